import { useQuery } from "@/api/client";

const OFFERED = 200;

interface RunPickerProps {
  project: string;
  run: string | undefined;
  label: string;
  /** What stands for no run. */
  none: string;
  onChange: (run: string | undefined) => void;
}

/** Chooses one of a project's newest runs, or none; the chosen one is offered even if it is older. */
export function RunPicker({ project, run, label, none, onChange }: RunPickerProps) {
  const runs = useQuery("get", "/v1/projects/{project}/runs", {
    params: { path: { project }, query: { limit: OFFERED } },
  });
  const names = (runs.data?.items ?? []).map((each) => each.name);
  const offered = run === undefined || names.includes(run) ? names : [run, ...names];
  return (
    <label>
      {label}{" "}
      <select value={run ?? ""} onChange={(event) => onChange(event.target.value || undefined)}>
        <option value="">{none}</option>
        {offered.map((name) => (
          <option key={name}>{name}</option>
        ))}
      </select>
    </label>
  );
}
