// What a run was: settings that differ from the defaults or are held by the owner, where it comes from, its limits.
import type { RunFixed, RunLive, Setting, Value } from "../../contract/run.ts";
import { Interval } from "../../charts/spark.tsx";
import { brief, duration, money, percent, quantity } from "../../format.ts";
import { Card, Icon, Nothing } from "../../parts/parts.tsx";
import { plain, Text } from "../../parts/text.tsx";
import { link } from "../../router.ts";

const written = (value: Value) => (value !== null && typeof value === "object" ? value.foreign : brief(value));

export function SettingsCard({ fixed }: { fixed: RunFixed }) {
  const { lineage } = fixed;
  const origins: [string, string | null, string][] = [
    ["forked from", lineage.base_run, "run"],
    ["continues", lineage.continues, "run"],
    ["reproduces", lineage.reproduces, "run"],
    ["member of", lineage.sweep, "sweep"],
    ["data set", lineage.dataset, "dataset"],
  ];
  return (
    <Card title="Settings and rope" note="what differs from the defaults, and what the owner holds">
      <dl class="pairs small">
        {fixed.preset && (
          <>
            <dt>preset</dt>
            <dd>
              <code>{fixed.preset}</code>
            </dd>
          </>
        )}
        {origins.map(
          ([words, id, screen]) =>
            id && (
              <>
                <dt>{words}</dt>
                <dd>
                  <a href={link([screen, id])}>
                    <code>{id}</code>
                  </a>
                </dd>
              </>
            ),
        )}
        {fixed.limits.length > 0 && (
          <>
            <dt>stopped at</dt>
            <dd>{fixed.limits.map((one) => quantity(one.quantity, one.cap)).join(", ")}</dd>
          </>
        )}
        <dt>folder</dt>
        <dd>
          <code>{fixed.folder}</code>
        </dd>
      </dl>
      {fixed.settings.length === 0 && <Nothing>Every setting has its default.</Nothing>}
      {fixed.settings.length > 0 && (
        <div class="wide-table" tabIndex={0} role="region" aria-label="Settings">
          <table class="settings">
            <thead>
              <tr>
                <th scope="col">field</th>
                <th scope="col">value</th>
                <th scope="col">default, or the owner's lock</th>
              </tr>
            </thead>
            <tbody>
              {fixed.settings.map((setting) => (
                <OneSetting key={setting.field} setting={setting} />
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

function OneSetting({ setting }: { setting: Setting }) {
  return (
    <tr>
      <th scope="row">
        <code>{setting.field}</code>
      </th>
      <td>
        <code>
          <Text>{written(setting.value)}</Text>
        </code>
      </td>
      <td class={setting.lock ? "accent" : "quiet"} title={setting.reason ? plain(setting.reason.foreign) : undefined}>
        {setting.lock ? (
          <span class="held">
            <Icon name="lock" /> <Text>{setting.lock}</Text>
          </span>
        ) : (
          <>
            default <Text>{written(setting.default) || "empty"}</Text>
          </>
        )}
      </td>
    </tr>
  );
}

/** A test of several models: each with its accuracy. */
export function Models({ live }: { live: RunLive }) {
  return (
    <Card title="Models" note="accuracy with 95 % intervals">
      <ul class="best">
        {live.models.map((model) => (
          <li>
            <span class="strong cut">
              <Text>{model.name.foreign}</Text>
            </span>
            {model.accuracy ? (
              <Interval after={model.accuracy} />
            ) : (
              <span class="bad small">
                <Text>{model.error?.foreign ?? "not measured"}</Text>
              </span>
            )}
            <span class="value strong">
              {model.accuracy ? percent(model.accuracy.value) : ""}{" "}
              <span class="quiet small">
                {duration(model.seconds)}
                {model.usd ? `, ${money(model.usd)}` : ""}
              </span>
            </span>
          </li>
        ))}
      </ul>
    </Card>
  );
}
