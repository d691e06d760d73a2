// The difference between two short texts, shown inside each of them.
import type { ComponentChildren } from "preact";
import { Text } from "./text.tsx";

/** Longer texts are compared word by word, and very long ones not at all. */
const MOST_PIECES = 400;

type Piece = { text: string; common: boolean };

/** Split both texts into pieces that the other has too and pieces that it lacks (longest common subsequence). */
export function difference(before: string, after: string): [Piece[], Piece[]] {
  let [a, b] = [Array.from(before), Array.from(after)];
  if (Math.max(a.length, b.length) > 80) [a, b] = [before.split(/(?<=\s)/), after.split(/(?<=\s)/)];
  if (Math.max(a.length, b.length) > MOST_PIECES) {
    return [[{ text: before, common: true }], [{ text: after, common: true }]];
  }
  const lengths: Uint16Array[] = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i]![j] = a[i] === b[j] ? lengths[i + 1]![j + 1]! + 1 : Math.max(lengths[i + 1]![j]!, lengths[i]![j + 1]!);
    }
  }
  const [left, right]: [Piece[], Piece[]] = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add(left, a[i]!, true);
      add(right, b[j]!, true);
      i += 1;
      j += 1;
    } else if (j >= b.length || (i < a.length && lengths[i + 1]![j]! >= lengths[i]![j + 1]!)) {
      add(left, a[i]!, false);
      i += 1;
    } else {
      add(right, b[j]!, false);
      j += 1;
    }
  }
  return [left, right];
}

function add(pieces: Piece[], text: string, common: boolean): void {
  const last = pieces.at(-1);
  if (last && last.common === common) last.text += text;
  else pieces.push({ text, common });
}

/** Then and now beside each other; what disappeared is struck, what is new is marked. */
export function ThenNow({ then, now }: { then: string; now: string }) {
  const [left, right] = difference(then, now);
  const shown = (pieces: Piece[], Mark: "del" | "ins"): ComponentChildren =>
    pieces.map((piece) =>
      piece.common ? (
        <Text>{piece.text}</Text>
      ) : (
        <Mark>
          <Text>{piece.text}</Text>
        </Mark>
      ),
    );
  return (
    <span class="thennow">
      <code>{then ? shown(left, "del") : <em>nothing</em>}</code>
      <span aria-label="then, now:"> → </span>
      <code>{now ? shown(right, "ins") : <em>nothing</em>}</code>
    </span>
  );
}
