// The numbers of a chart as a table, made only while it is open.
import { useState } from "preact/hooks";
import { count, number, percent } from "../format.ts";
import { plain } from "../parts/text.tsx";
import type { ChartModel } from "./model.ts";

interface Props {
  title: string;
  model: ChartModel;
  open?: boolean;
  onOpen?: (open: boolean) => void;
}

export function ChartTable({ title, model, open = false, onOpen }: Props) {
  const [shown, setShown] = useState(open);
  return (
    <details
      class="table"
      open={open || undefined}
      onToggle={(event) => {
        const now = event.currentTarget.open;
        setShown(now);
        if (now !== open) onOpen?.(now);
      }}
    >
      <summary>
        Table<span class="unheard"> of {plain(title)}</span>
      </summary>
      {shown && <Rows title={title} model={model} />}
    </details>
  );
}

function Rows({ title, model }: Props) {
  const value = model.share ? (one: number | null | undefined) => percent(one, 2) : number;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={plain(`Table of ${title}`)}>
      <table>
        <thead>
          <tr>
            <th scope="col">step</th>
            {model.lines.map((line) => (
              <>
                <th scope="col">{line.label}</th>
                {line.low && <th scope="col">lowest</th>}
                {line.high && <th scope="col">highest</th>}
              </>
            ))}
          </tr>
        </thead>
        <tbody>
          {model.x.map((x, i) => (
            <tr key={x}>
              <th scope="row">{count(x)}</th>
              {model.lines.map((line) => (
                <>
                  <td>{value(line.mean[i])}</td>
                  {line.low && <td>{value(line.low[i])}</td>}
                  {line.high && <td>{value(line.high[i])}</td>}
                </>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {Boolean(model.points?.length) && (
        <table>
          <thead>
            <tr>
              <th scope="col">step</th>
              <th scope="col">evaluation</th>
              <th scope="col">value</th>
              <th scope="col">95 % interval</th>
            </tr>
          </thead>
          <tbody>
            {model.points!.map((point) => (
              <tr>
                <th scope="row">{count(point.x)}</th>
                <td>{point.label}</td>
                <td>{value(point.y)}</td>
                <td>{point.low == null ? "–" : `${value(point.low)} to ${value(point.high)}`}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </div>
  );
}
