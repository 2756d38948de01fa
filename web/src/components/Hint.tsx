import * as Tooltip from "@radix-ui/react-tooltip";
import { createContext, type ReactElement, type ReactNode, useContext, useRef, useState } from "react";
import styles from "./Hint.module.css";

/** Where hints are put: a modal dialog hides what stands outside of it. null: the end of the page. */
export const HintPlace = createContext<HTMLElement | null>(null);

/** Shows `text` on hover and on focus of its child, which takes a ref and can be focused. Screen readers hear it as the
 * child's description. undefined: there is nothing to say now. */
export function Hint({ text, children }: { text: ReactNode; children: ReactElement }) {
  const [isOpen, setOpen] = useState(false);
  const trigger = useRef<HTMLButtonElement>(null);
  const isDismissed = useRef(false);

  // What the keyboard is on keeps its hint. Radix would close it when the page scrolls, and the page scrolls because the
  // focus went to something below.
  function change(next: boolean) {
    const isHeld = !next && !isDismissed.current && trigger.current?.matches(":focus-visible");
    isDismissed.current = false;
    if (!isHeld) setOpen(next);
  }

  return (
    <Tooltip.Root open={isOpen && text !== undefined} onOpenChange={change}>
      <Tooltip.Trigger asChild ref={trigger}>
        {children}
      </Tooltip.Trigger>
      <Tooltip.Portal container={useContext(HintPlace)}>
        <Tooltip.Content
          className={styles.hint}
          sideOffset={4}
          collisionPadding={8}
          onEscapeKeyDown={() => {
            isDismissed.current = true;
          }}
        >
          {text}
        </Tooltip.Content>
      </Tooltip.Portal>
    </Tooltip.Root>
  );
}

/** Once around the page: how soon hints come. */
export function Hints({ children }: { children: ReactNode }) {
  return <Tooltip.Provider delayDuration={200}>{children}</Tooltip.Provider>;
}
