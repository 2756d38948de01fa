/** What the navigation offers, in this order. A screen that is opened from another one has no line here. */
export const NAVIGATION = [
  { to: "/", label: "Overview" },
  { to: "/runs", label: "Runs" },
  { to: "/operations", label: "Operations" },
] as const;
