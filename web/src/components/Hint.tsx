import * as Tooltip from "@radix-ui/react-tooltip";
import { createContext, type ReactElement, type ReactNode, useContext } from "react";
import styles from "./Hint.module.css";

/** Where hints are put: a modal dialog hides what stands outside of it. null: the end of the page. */
export const HintPlace = createContext<HTMLElement | null>(null);

/** Shows `text` on hover and on focus of its child, which takes a ref and can be focused. Screen readers hear it as the
 * child's description. */
export function Hint({ text, children }: { text: ReactNode; children: ReactElement }) {
  return (
    <Tooltip.Root>
      <Tooltip.Trigger asChild>{children}</Tooltip.Trigger>
      <Tooltip.Portal container={useContext(HintPlace)}>
        <Tooltip.Content className={styles.hint} sideOffset={4} collisionPadding={8}>
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
