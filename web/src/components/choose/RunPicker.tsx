import { useAllRuns } from "./allRuns";

interface RunPickerProps {
  project: string;
  run: string | undefined;
  onChange: (run: string | undefined) => void;
  label: string;
  /** What stands for no run. */
  none: string;
}

/** One run of a project, or none. */
export function RunPicker({ project, run, onChange, label, none }: RunPickerProps) {
  const names = (useAllRuns(project).data ?? []).map((each) => each.name);
  const offered = run === undefined || names.includes(run) ? names : [run, ...names];
  return (
    <label>
      {label}{" "}
      <select value={run ?? ""} onChange={(event) => onChange(event.target.value || undefined)}>
        <option value="">{none}</option>
        {offered.map((name) => (
          <option key={name} value={name}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}
