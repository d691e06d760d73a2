// The screen before an answer arrives and without one; actions and their outcomes.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { type Asked, refusalOf, theSource, told, useLost } from "../live.ts";
import type { Action, Done, Refusal } from "../sources/source.ts";
import { Card } from "./parts.tsx";
import { Paragraph, Text } from "./text.tsx";

/** While the connection is lost, `Away` says so for all. */
export function Refused({ refusal, again }: { refusal: Refusal; again?: () => void }) {
  return useLost() ? null : (
    <Card class="alert" title={<Text>{refusal.message}</Text>}>
      {refusal.hint && <Paragraph>{refusal.hint}</Paragraph>}
      {again && (
        <p>
          <button type="button" onClick={again}>
            Ask again
          </button>
        </p>
      )}
    </Card>
  );
}

/** The answer drawn by `children`; before it, a word; with a refusal, its reason, above the last answer. */
export function Answered<T>({ of, children }: { of: Asked<T>; children: (answer: T) => ComponentChildren }) {
  const refused = of.refusal && <Refused refusal={of.refusal} again={of.again} />;
  if (!of.answer) return refused ?? <Loading />;
  return (
    <>
      {refused}
      {children(of.answer)}
    </>
  );
}

export function Loading() {
  return (
    <div class="loading" role="status">
      Reading …
    </div>
  );
}

export interface Acting {
  act: (action: Action) => Promise<Done | null>;
  busy: boolean;
  /** What became of the last action, for `Outcome`. */
  outcome: { words: string; bad: boolean } | null;
}

export function useAction(): Acting {
  const [state, set] = useState<{ busy: boolean; outcome: Acting["outcome"] }>({ busy: false, outcome: null });
  return {
    ...state,
    act: async (action) => {
      set({ busy: true, outcome: null });
      try {
        const done = await theSource().act(action);
        set({ busy: false, outcome: { words: done.said, bad: false } });
        told({ all: true });
        return done;
      } catch (error) {
        const refusal = refusalOf(error);
        set({ busy: false, outcome: { words: [refusal.message, refusal.hint].filter(Boolean).join(" "), bad: true } });
        return null;
      }
    },
  };
}

export function Outcome({ of }: { of: Acting }) {
  const place = useRef<HTMLDivElement>(null);
  // A button that is disabled while it works loses the focus.
  useEffect(() => {
    if (of.outcome && document.activeElement === document.body) place.current!.focus({ preventScroll: true });
  }, [of.outcome]);
  return (
    <div role="status" class="outcome" ref={place} tabIndex={-1}>
      {of.outcome && <Paragraph class={`told ${of.outcome.bad ? "bad" : ""}`}>{of.outcome.words}</Paragraph>}
    </div>
  );
}
