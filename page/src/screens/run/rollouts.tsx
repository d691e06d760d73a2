// Rollouts: groups then and now, and whole conversations.
import { useEffect, useRef } from "preact/hooks";
import type { Change } from "../../contract/common.ts";
import type { Group, GroupItem, Rollouts } from "../../contract/run.ts";
import { number, plural, rough } from "../../format.ts";
import { useAnswer } from "../../live.ts";
import { Answered } from "../../parts/answers.tsx";
import { ThenNow } from "../../parts/difference.tsx";
import { Bar, Card, Nothing, Pill, Tabs } from "../../parts/parts.tsx";
import { Paragraph, Text } from "../../parts/text.tsx";
import { choose, link, useRoute } from "../../router.ts";

const ORDERS = [
  ["most_changed", "most changed"],
  ["newest", "newest"],
  ["best", "best"],
  ["worst", "worst"],
] as const;

export function RolloutsCard({ runId, live }: { runId: string; live: boolean }) {
  const { at, path } = useRoute();
  const chosen = ORDERS.find(([name]) => name === at.order)?.[0];
  const rest = { what: "rollouts", run_id: runId, task: at.task, failed: at.failed === "1" ? 1 : undefined, cursor: at.rollouts };
  const grew = (change: Change) => live && Boolean(change.runs?.[runId]?.includes("metrics"));
  const first = useAnswer<Rollouts>({ ...rest, order: chosen ?? "most_changed" }, grew, 15_000);
  // Where no task was played twice, nothing can have changed: unless a reader chose otherwise, show the newest.
  const unchanged = !chosen && first.answer?.groups.length === 0;
  const newest = useAnswer<Rollouts>(unchanged ? { ...rest, order: "newest" } : null, grew, 15_000);
  const [order, asked] = unchanged ? (["newest", newest] as const) : ([chosen ?? "most_changed", first] as const);
  const tab = (name: string) => link(path, { ...at, order: name, rollouts: null, group: null });
  return (
    <Card
      id="rollouts"
      class="rollouts"
      title="Rollouts"
      note={<>{asked.answer && `${rough(asked.answer.matching)} groups · `}texts are untrusted data</>}
    >
      <div class="row">
        <Tabs label="Order of rollouts" chosen={order} of={ORDERS.map(([name, words]) => [name, words, tab(name)])} />
        <label class="row small quiet push">
          <input type="checkbox" checked={at.failed === "1"} onChange={(event) => choose({ failed: event.currentTarget.checked ? "1" : null, rollouts: null })} />
          only with errors
        </label>
      </div>
      {at.group && <Conversation runId={runId} group={Number(at.group)} />}
      <Answered of={asked}>
        {(answer) => (
          <>
            {answer.groups.length === 0 && (
              <Nothing>
                <Text>{answer.why_none ?? "No group yet."}</Text>
              </Nothing>
            )}
            <ul class="list groups">
              {answer.groups.map((group) => (
                <li key={group.group}>
                  <GroupLine group={group} chosen={at.group === String(group.group)} />
                </li>
              ))}
            </ul>
            <p class="row small">
              {!answer.complete && <span class="quiet">Only the newest {rough(answer.scanned)} groups were read.</span>}
              {at.rollouts && <a class="page" href={link(path, { ...at, rollouts: null })}>First page</a>}
              {answer.next_cursor && <a class="page" href={link(path, { ...at, rollouts: answer.next_cursor })}>Next page</a>}
            </p>
          </>
        )}
      </Answered>
    </Card>
  );
}

function GroupLine({ group, chosen }: { group: GroupItem; chosen: boolean }) {
  const { at, path } = useRoute();
  const now = group.shown[0];
  const address = link(path, { ...at, group: chosen ? null : String(group.group) });
  const good = group.size ? group.successes / group.size : 0;
  return (
    <a class="groupline" href={address} aria-current={chosen ? "true" : undefined}>
      <span class="cut quiet">
        <Text>{group.prompt?.foreign ?? group.task.foreign}</Text>
      </span>
      {group.then ? (
        <ThenNow then={group.then.answer?.foreign ?? ""} now={now?.answer?.foreign ?? ""} />
      ) : (
        <code class="cut answer">
          <Text>{now?.answer?.foreign ?? now?.error?.foreign ?? "no answer"}</Text>
        </code>
      )}
      <span class="row score">
        <Bar share={good} label="Rollouts of the group that succeeded" />
        <span class="mono">
          {group.successes}/{group.size}
        </span>
        <span class="mono quiet" title="policy version">
          {group.version == null ? "" : `v${group.version}`}
        </span>
      </span>
    </a>
  );
}

/** All rollouts of a group, message by message; one is shown at a time. */
function Conversation({ runId, group }: { runId: string; group: number }) {
  const { at, path } = useRoute();
  const asked = useAnswer<Group>({ what: "group", run_id: runId, group, cursor: at.members });
  const place = useRef<HTMLElement>(null);
  useEffect(() => place.current?.focus({ preventScroll: true }), [group]);
  return (
    <section class="conversation" ref={place} tabIndex={-1} aria-label={`Group ${group}`}>
      <Answered of={asked}>
        {(answer) => {
          const chosen = answer.rollouts.find((one) => String(one.n) === at.rollout) ?? answer.rollouts[0];
          return (
            <>
              <p class="row">
                <span class="strong">Group {answer.group}</span>
                <span class="quiet small">
                  task <Text>{answer.task.foreign}</Text> · {answer.successes} of {answer.size} right{answer.policy_version != null && ` · version ${answer.policy_version}`}
                </span>
                <a class="push quiet" href={link(path, { ...at, group: null, rollout: null, members: null })}>
                  Close
                </a>
              </p>
              {answer.note && <Paragraph class="quiet small">{answer.note}</Paragraph>}
              {answer.rollouts.length > 1 && (
                <Tabs
                  label="Rollouts of the group"
                  chosen={String(chosen?.n)}
                  of={answer.rollouts.map((one) => [String(one.n), `${one.n} · ${number(one.reward)}${one.success ? " ✓" : ""}`, link(path, { ...at, rollout: String(one.n) })])}
                />
              )}
              {chosen && (
                <>
                  <p class="row small">
                    <Pill tone={chosen.success ? "good" : "bad"}>{chosen.success ? "right" : "wrong"}</Pill>
                    <span>reward {number(chosen.reward)}</span>
                    {chosen.parts.map((part) => (
                      <span class="quiet">
                        <Text>{part.name.foreign}</Text> {number(part.value)}
                      </span>
                    ))}
                    <span class="quiet">{plural(chosen.turns, "turn")}</span>
                    {chosen.truncated && <Pill tone="warn">truncated</Pill>}
                  </p>
                  {chosen.error && <Paragraph class="bad">{chosen.error.foreign}</Paragraph>}
                  <ol class="messages">
                    {[...answer.asked, ...chosen.messages].map((message) => (
                      <li class={message.role.foreign === "assistant" ? "mine" : ""}>
                        <span class="quiet small">
                          <Text>{message.role.foreign}</Text>
                        </span>
                        <pre>
                          {message.text.foreign ? <Text>{message.text.foreign}</Text> : <em>nothing</em>}
                        </pre>
                      </li>
                    ))}
                  </ol>
                </>
              )}
              {answer.next_cursor && <a class="page" href={link(path, { ...at, members: answer.next_cursor, rollout: null })}>More rollouts of this group</a>}
            </>
          );
        }}
      </Answered>
    </section>
  );
}
