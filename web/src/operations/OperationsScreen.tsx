import { Link, Outlet, useMatchRoute } from "@tanstack/react-router";
import { Suspense } from "react";
import { Screen } from "@/app/Screen";
import { Loading } from "@/components/states";
import styles from "./Operations.module.css";

const TABS = [
  { to: "/operations/controllers", label: "Controllers" },
  { to: "/operations/long", label: "Long operations" },
  { to: "/operations/events", label: "Events" },
  { to: "/operations/webhooks", label: "Webhooks" },
  { to: "/operations/tokens", label: "Tokens" },
  { to: "/operations/projects", label: "Projects" },
  { to: "/operations/audit", label: "Audit" },
  { to: "/operations/workers", label: "Workers" },
] as const;

/** What the service does by itself, who may do what, and who did it. Each tab is an address of its own. */
export function OperationsScreen() {
  const matches = useMatchRoute();
  const tab = TABS.find(({ to }) => matches({ to }));
  return (
    <Screen title={tab?.label ?? "Operations"} above={tab ? [<span key="operations">Operations</span>] : []}>
      <nav aria-label="Operations" className={styles.tabs}>
        {TABS.map(({ to, label }) => (
          <Link key={to} to={to} activeOptions={{ includeSearch: false }}>
            {label}
          </Link>
        ))}
      </nav>
      <Suspense fallback={<Loading what={tab?.label.toLowerCase() ?? "the tab"} />}>
        <Outlet />
      </Suspense>
    </Screen>
  );
}
