/** What the navigation offers, in this order. A screen that is opened from another one has no line here. */
export const NAVIGATION = [
  { to: "/", label: "Overview" },
  { to: "/runs", label: "Runs" },
  { to: "/checkpoints", label: "Checkpoints" },
  { to: "/operations", label: "Operations" },
  { to: "/retention", label: "Retention and cost" },
  { to: "/storage", label: "Storage" },
] as const;
