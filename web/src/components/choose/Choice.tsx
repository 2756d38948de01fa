interface ChoiceProps<Word extends string> {
  label: string;
  value: Word | undefined;
  offered: readonly Word[];
  /** undefined: all of them. */
  onChange: (chosen: Word | undefined) => void;
  className?: string | undefined;
}

/** One of a few words, or all. */
export function Choice<Word extends string>({ label, value, offered, onChange, className }: ChoiceProps<Word>) {
  return (
    <label className={className}>
      {label}{" "}
      <select value={value ?? ""} onChange={(event) => onChange(offered.find((each) => each === event.target.value))}>
        <option value="">all</option>
        {offered.map((each) => (
          <option key={each}>{each}</option>
        ))}
      </select>
    </label>
  );
}
