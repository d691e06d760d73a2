// The rope: what the owner's files hold, and how much of each limit is used. The page can read them, never write them.
import type { Rope } from "../contract/common.ts";
import { number } from "../format.ts";
import { Answered } from "../parts/answers.tsx";
import { Bar, Card, Icon, Nothing } from "../parts/parts.tsx";
import { Paragraph, Text } from "../parts/text.tsx";
import { useNow } from "./now.tsx";

const file = (path: string) => path.split("/").at(-1);

export function RopeScreen() {
  return (
    <Answered of={useNow()}>
      {(now) => (
        <>
          <header>
            <h1>The rope</h1>
          </header>
          <Card title="Files" note="edit them with an editor; they apply from the next call on">
            <dl class="pairs">
              {[now.rope.limits_file, now.rope.locks_file].map((path) => (
                <>
                  <dt>{file(path)}</dt>
                  <dd>
                    <code>{path}</code>
                    {!path.startsWith(now.rope.folder) && (
                      <span class="quiet">
                        {" "}
                        comes with Toprope; a file of yours in <code>{now.rope.folder}</code> replaces it
                      </span>
                    )}
                  </dd>
                </>
              ))}
              {now.rope.confirm_by && (
                <>
                  <dt>confirmations</dt>
                  <dd>{now.rope.confirm}</dd>
                  <dt>given by</dt>
                  <dd>{now.rope.confirm_by}</dd>
                </>
              )}
            </dl>
          </Card>
          <RopeCard rope={now.rope} whole />
        </>
      )}
    </Answered>
  );
}

export function RopeCard({ rope, whole }: { rope: Rope; whole?: boolean }) {
  if (!rope.confirm_by)
    return (
      <Card class="alert" title="The rope cannot be read: nothing starts">
        <Paragraph>{rope.confirm}</Paragraph>
      </Card>
    );
  const limits = (
    <>
      {rope.limits.length === 0 && <Nothing>No limit is set.</Nothing>}
      <ul class="limits">
        {rope.limits.map((limit) => (
          <li key={limit.name}>
            <span>{limit.label}</span>
            {limit.used != null ? (
              <>
                <Bar share={limit.max ? limit.used / limit.max : 1} label={`${limit.label}, part used`} limit />
                <span class="mono">
                  {number(Number(limit.used.toFixed(2)))} / {number(limit.max)}
                </span>
              </>
            ) : (
              <span class="mono push">≤ {number(limit.max)}</span>
            )}
            {whole && limit.reason && <Paragraph class="quiet small">{limit.reason.foreign}</Paragraph>}
          </li>
        ))}
      </ul>
    </>
  );
  const locks = (
    <>
      {rope.locks.length === 0 && <Nothing>No field is locked.</Nothing>}
      <ul class="locks">
        {rope.locks.map((lock) => (
          <li key={lock.field}>
            <Icon name="lock" />
            <div>
              <p class="row">
                <code>{lock.field}</code>
                <span class="push">
                  <Text>{lock.says.foreign}</Text>
                </span>
              </p>
              <Paragraph class="quiet small">{lock.reason.foreign}</Paragraph>
            </div>
          </li>
        ))}
      </ul>
    </>
  );
  if (whole)
    return (
      <div class="pair">
        <Card title="Limits" note={file(rope.limits_file)}>
          {limits}
        </Card>
        <Card title="Locks" note={file(rope.locks_file)}>
          {locks}
        </Card>
      </div>
    );
  return (
    <Card
      title="The rope"
      note={
        <>
          {file(rope.limits_file)} and {file(rope.locks_file)}; no tool and no button writes them
        </>
      }
    >
      {limits}
      <hr />
      {locks}
    </Card>
  );
}
