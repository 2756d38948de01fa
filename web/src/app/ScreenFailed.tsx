import { type ErrorComponentProps, Link } from "@tanstack/react-router";
import { ErrorState } from "@/components/states";
import { Screen } from "./Screen";

export function ScreenFailed({ error, reset }: ErrorComponentProps) {
  return (
    <Screen title="This screen failed">
      <ErrorState error={error} onRetry={reset} />
    </Screen>
  );
}

export function NotFound() {
  return (
    <Screen title="Nothing is here">
      <p>
        The address names no screen of this page. Correct it, or begin at the <Link to="/">overview</Link>.
      </p>
    </Screen>
  );
}
