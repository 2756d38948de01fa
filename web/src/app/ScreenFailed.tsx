import { type ErrorComponentProps, Link } from "@tanstack/react-router";
import { ErrorState } from "@/components/states";
import { Screen } from "./Screen";

/** Retry loads the page anew: a browser does not fetch a file of a screen again that it could not load before. The
 * address has all that the reader chose. */
export function ScreenFailed({ error }: ErrorComponentProps) {
  return (
    <Screen title="This screen failed">
      <ErrorState error={error} onRetry={() => window.location.reload()} />
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
