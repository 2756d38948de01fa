import { useSyncExternalStore } from "react";

export type Theme = "light" | "dark";

/** The reader's choice is kept in this cookie, for the page alone; without one the system's is followed. */
const COOKIE = "holdfast_theme";
const YEAR_SECONDS = 365 * 86_400;
const system = window.matchMedia("(prefers-color-scheme: dark)");
// Read here once, and then told by the event: Chromium sends no event of a change that somebody has read before it.
let systemIsDark = system.matches;
const listeners = new Set<() => void>();

function chosen(): Theme | null {
  const found = document.cookie.split("; ").find((each) => each.startsWith(`${COOKIE}=`));
  const value = found?.slice(COOKIE.length + 1);
  return value === "light" || value === "dark" ? value : null;
}

function current(): Theme {
  return chosen() ?? (systemIsDark ? "dark" : "light");
}

function show() {
  document.documentElement.dataset.theme = current();
  for (const each of listeners) each();
}

/** Before the first rendering. */
export function beginTheme(): void {
  system.addEventListener("change", ({ matches }) => {
    systemIsDark = matches;
    show();
  });
  show();
}

function listen(listener: () => void) {
  listeners.add(listener);
  return () => {
    listeners.delete(listener);
  };
}

export function useTheme(): [Theme, (theme: Theme) => void] {
  const theme = useSyncExternalStore(listen, current);
  return [
    theme,
    (next) => {
      // biome-ignore lint/suspicious/noDocumentCookie: the Cookie Store API is not in every browser yet.
      document.cookie = `${COOKIE}=${next}; Path=/ui; Max-Age=${YEAR_SECONDS}; SameSite=Strict`;
      show();
    },
  ];
}
