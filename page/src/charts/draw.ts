// What uPlot has no words for: bands, spans of findings, checkpoints, evaluations with intervals. Drawn on its canvas.
import type uPlot from "uplot";
import { colours } from "./colours.ts";
import type { ChartModel, Span } from "./model.ts";

/** Below the curves: spans first, then the bands. */
export function drawBelow(u: uPlot, model: ChartModel): void {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  (model.spans ?? []).forEach((span, lane) => drawSpan(u, span, lane));
  for (const line of model.lines) {
    if (!line.low || !line.high) continue;
    ctx.fillStyle = colours().soft(line.colour, 0.18);
    drawBand(u, model.x, line.low, line.high);
  }
  ctx.restore();
}

/** Above the curves: checkpoints on the axis, and evaluations. */
export function drawAbove(u: uPlot, model: ChartModel): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio || 1;
  const palette = colours();
  const [from, to] = [u.scales.x!.min ?? 0, u.scales.x!.max ?? 1];
  ctx.save();
  ctx.fillStyle = palette.quiet;
  const base = bbox.top + bbox.height;
  for (const step of model.checkpoints ?? []) {
    if (step < from || step > to) continue;
    const x = u.valToPos(step, "x", true);
    ctx.beginPath();
    ctx.moveTo(x, base - 5 * ratio);
    ctx.lineTo(x - 3.5 * ratio, base + 1 * ratio);
    ctx.lineTo(x + 3.5 * ratio, base + 1 * ratio);
    ctx.fill();
  }
  const accent = palette.of("accent");
  for (const point of model.points ?? []) {
    if (point.x < from || point.x > to) continue;
    const x = u.valToPos(point.x, "x", true);
    ctx.strokeStyle = accent;
    if (point.low != null && point.high != null) {
      ctx.lineWidth = 5 * ratio;
      ctx.lineCap = "round";
      ctx.globalAlpha = 0.35;
      ctx.beginPath();
      ctx.moveTo(x, u.valToPos(point.low, "y", true));
      ctx.lineTo(x, u.valToPos(point.high, "y", true));
      ctx.stroke();
      ctx.globalAlpha = 1;
    }
    ctx.fillStyle = palette.card;
    ctx.lineWidth = 2 * ratio;
    ctx.beginPath();
    ctx.arc(x, u.valToPos(point.y, "y", true), 4.5 * ratio, 0, Math.PI * 2);
    ctx.fill();
    ctx.stroke();
  }
  ctx.restore();
}

function drawBand(u: uPlot, x: readonly number[], low: readonly (number | null)[], high: readonly (number | null)[]): void {
  const { ctx } = u;
  let start = -1;
  for (let i = 0; i <= x.length; i += 1) {
    const there = i < x.length && low[i] != null && high[i] != null;
    if (there && start < 0) start = i;
    if (there || start < 0) continue;
    ctx.beginPath();
    for (let j = start; j < i; j += 1) ctx.lineTo(u.valToPos(x[j]!, "x", true), u.valToPos(high[j]!, "y", true));
    for (let j = i - 1; j >= start; j -= 1) ctx.lineTo(u.valToPos(x[j]!, "x", true), u.valToPos(low[j]!, "y", true));
    ctx.fill();
    start = -1;
  }
}

// Spans overlap, so each has a lane of its own for its line and its name.
function drawSpan(u: uPlot, span: Span, lane: number): void {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio || 1;
  const palette = colours();
  const colour = span.level === "critical" ? "red" : span.level === "warning" ? "orange" : "grey";
  const left = Math.max(u.valToPos(span.from, "x", true), bbox.left);
  const end = span.to == null ? bbox.left + bbox.width : u.valToPos(span.to, "x", true);
  const width = Math.max(Math.min(end, bbox.left + bbox.width) - left, 2 * ratio);
  if (left > bbox.left + bbox.width || left + width < bbox.left) return;
  const top = bbox.top + lane * 17 * ratio;
  ctx.fillStyle = palette.soft(colour, 0.07);
  ctx.fillRect(left, top, width, bbox.top + bbox.height - top);
  ctx.fillStyle = palette.of(colour);
  ctx.fillRect(left, top, width, 2 * ratio);
  ctx.font = `${11 * ratio}px ${palette.font.slice(5)}`;
  const text = ctx.measureText(span.label).width;
  if (text + 10 * ratio > width) return;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  ctx.fillText(span.label, left + 5 * ratio, top + 4 * ratio);
}
