import type { ReactElement } from "react";
import { cloneElement } from "react";
import { type Scope, useSession } from "@/api/session";
import { Hint } from "./Hint";

interface Control {
  "aria-disabled"?: boolean;
  onClick?: unknown;
}

interface CanProps {
  scope: Scope;
  reason?: string | undefined;
  /** Said of the control while it works, for example why it failed the last time. */
  hint?: string | undefined;
  children: ReactElement<Control>;
}

/** A button for those whose token has the scope. For others it is shown disabled, with the reason; `reason` says why it
 * is disabled for everybody at the moment. It stays in the order of the keyboard, so that the reason can be read. */
export function Can(props: CanProps) {
  const { scope, hint, children } = props;
  const { name, scopes } = useSession();
  const missing = `The token “${name}” has not the scope “${scope}”. Sign in with one that has it.`;
  const reason = scopes.includes(scope) ? props.reason : missing;
  const disabled = {
    "aria-disabled": true,
    onClick: (event: Event) => event.preventDefault(),
  };
  // In a hint either way: without it React would make another button, and the focus would be gone.
  return <Hint text={reason ?? hint}>{reason === undefined ? children : cloneElement(children, disabled)}</Hint>;
}
