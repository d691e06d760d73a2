// Texts of environments, models, logs and agents. They are text nodes only; characters that a reader cannot see, or that
// reorder what he sees, are shown as marks with their code points.
import type { ComponentChildren } from "preact";

// Controls except tab and line ends; format characters, which include the bidirectional ones, zero-width ones and tags;
// fillers that are drawn as nothing; lone surrogates; private use.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\p{Cf}\p{Cs}\p{Co}\u115f\u1160\u3164\uffa0\u2028\u2029]/u;
const UNSEEN_ALL = new RegExp(UNSEEN, "gu");

/** The text with marks for unseen characters. */
export function Text({ children }: { children: unknown }) {
  const text = children == null ? "" : String(children);
  if (!UNSEEN.test(text)) return <>{text}</>;
  const parts: ComponentChildren[] = [];
  let from = 0;
  for (const found of text.matchAll(UNSEEN_ALL)) {
    parts.push(text.slice(from, found.index), <mark class="unseen">{codePoint(found[0])}</mark>);
    from = found.index + found[0].length;
  }
  parts.push(text.slice(from));
  return <>{parts}</>;
}

/** A paragraph of such a text. */
export function Paragraph({ class: look, children }: { class?: string; children: unknown }) {
  return (
    <p class={look}>
      <Text>{children}</Text>
    </p>
  );
}

/** For attributes, which have no room for marks: unseen characters become their code points. */
export function plain(value: unknown): string {
  return String(value ?? "").replace(UNSEEN_ALL, codePoint);
}

function codePoint(character: string): string {
  return `U+${(character.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}`;
}
