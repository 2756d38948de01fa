import { Link } from "@tanstack/react-router";
import { type ReactNode, useEffect, useMemo, useRef, useState } from "react";
import { formatCount } from "@/format/numbers";
import { type Lane, type Mark, type MarkKind, marksOf, ticksOf } from "./lanes";
import styles from "./Timeline.module.css";

const LANE_PX = 42;
const AXIS_PX = 26;
/** Marks that are nearer to one another than this are one. */
const GRAIN_PX = 5;
const TICK_PX = 90;
const LABEL_PX = 70;
const LOST = "url(#lost)";

export interface Inset {
  left: number;
  width: number;
}

interface TimelineProps {
  /** The newest first. */
  lanes: readonly Lane[];
  steps: readonly [number, number];
  restorePoint: string | undefined;
  /** Where the plot above has its steps, in px; null: no plot is above. */
  inset: Inset | null;
}

/** Attempts as lanes over steps. For those who do not see it, the tables of attempts and checkpoints say the same. */
export function Timeline({ lanes, steps, restorePoint, inset }: TimelineProps) {
  const place = useRef<HTMLDivElement>(null);
  const [wide, setWide] = useState(0);
  useEffect(() => {
    const element = place.current;
    if (element === null) return;
    const measure = () => setWide(element.clientWidth);
    measure();
    const resized = new ResizeObserver(measure);
    resized.observe(element);
    return () => resized.disconnect();
  }, []);

  const { left, width } = inset ?? { left: LABEL_PX, width: Math.max(50, wide - LABEL_PX - 16) };
  const [first, last] = steps;
  const perStep = width / (last - first);
  const x = (step: number) => left + (Math.max(first, Math.min(last, step)) - first) * perStep;
  const isInSight = (step: number) => step >= first && step <= last;
  const grain = GRAIN_PX / perStep;
  const marks = useMemo(
    () =>
      lanes.map((lane) =>
        marksOf(
          lane.checkpoints.filter((each) => each.step >= first && each.step <= last),
          grain,
          restorePoint,
        ),
      ),
    [lanes, first, last, grain, restorePoint],
  );
  const rows = new Map(lanes.map((lane, index) => [lane.attempt.number, index]));
  const y = (index: number) => index * LANE_PX + LANE_PX / 2;
  const height = lanes.length * LANE_PX;

  return (
    <div className={styles.lanes}>
      <div ref={place} />
      <svg
        aria-hidden="true"
        width={Math.max(wide, left + width)}
        height={height + AXIS_PX}
        className={styles.timeline}
        data-testid="timeline"
      >
        <defs>
          <pattern id="lost" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
            <rect width="6" height="6" className={styles.lostGround} />
            <line x1="0" y1="0" x2="0" y2="6" strokeWidth="5" className={styles.lostLine} />
          </pattern>
        </defs>
        {ticksOf(steps, width / TICK_PX).map((step) => (
          <g key={step} className={styles.tick}>
            <line x1={x(step)} x2={x(step)} y1={0} y2={height} />
            <text x={x(step)} y={height + 17} textAnchor="middle">
              {formatCount(step)}
            </text>
          </g>
        ))}
        {lanes.map((lane, index) => {
          const above = lane.parent === null ? undefined : rows.get(lane.parent.attempt);
          if (above === undefined || !isInSight(lane.base)) return null;
          const isRollback = lanes[index + 1]?.attempt.rolled_back_at != null;
          return (
            <line
              key={lane.attempt.number}
              x1={x(lane.base)}
              x2={x(lane.base)}
              y1={y(above)}
              y2={y(index)}
              className={`${styles.resumed} ${lane.onLineage ? styles.kept : ""} ${isRollback ? styles.rollback : ""}`}
            >
              <title>
                {`Attempt ${lane.attempt.number} ${isRollback ? "rolled back to" : "resumed from"} step ${lane.base}`}
              </title>
            </line>
          );
        })}
        {lanes.map((lane, index) => (
          <g key={lane.attempt.number} transform={`translate(0 ${y(index)})`} data-attempt={lane.attempt.number}>
            <LaneName lane={lane} left={left} />
            <Bar className={styles.kept} from={x(lane.base)} to={x(lane.keptTo)}>
              {`Steps ${lane.base + 1} to ${lane.keptTo} are on the lineage`}
            </Bar>
            <Bar fill={LOST} from={x(lane.keptTo)} to={x(lane.last)}>
              {`Steps ${lane.keptTo + 1} to ${lane.last} are lost: ${formatCount(lane.last - lane.keptTo)}`}
            </Bar>
            {x(lane.last) - x(lane.keptTo) > 70 && (
              <text x={(x(lane.keptTo) + x(lane.last)) / 2} y={-8} textAnchor="middle" className={styles.lostText}>
                {formatCount(lane.last - lane.keptTo)} lost
              </text>
            )}
            {marks[index]?.map((mark) => (
              <CheckpointMark key={`${mark.kind} ${mark.from}`} mark={mark} x={(x(mark.from) + x(mark.to)) / 2} />
            ))}
            {lane.isUnplaced ? (
              <text x={left + 8} y={4} className={styles.name}>
                {lane.attempt.ended_at === null ? "no step yet" : "ran no step"}
              </text>
            ) : (
              isInSight(lane.last) && <End lane={lane} x={x(lane.last)} />
            )}
          </g>
        ))}
      </svg>
    </div>
  );
}

function LaneName({ lane, left }: { lane: Lane; left: number }) {
  return (
    <text textAnchor="end" className={styles.name}>
      <tspan x={left - 5} y={-2} className={styles.number}>
        #{lane.attempt.number}
      </tspan>
      <tspan x={left - 5} y={12}>
        {endOf(lane)}
      </tspan>
    </text>
  );
}

/** How the attempt ended, in a word. */
export function endOf({ attempt }: Lane): string {
  if (attempt.rolled_back_at != null) return "rolled back";
  return attempt.outcome ?? (attempt.stalled_at == null ? (attempt.doing ?? "open") : "stalled");
}

interface BarProps {
  from: number;
  to: number;
  className?: string | undefined;
  fill?: string;
  children: string;
}

function Bar({ from, to, children, ...look }: BarProps) {
  if (to <= from) return null;
  return (
    <rect x={from} y={-4} width={to - from} height={8} rx={2} {...look}>
      <title>{children}</title>
    </rect>
  );
}

/** Opens the checkpoint; of several, the timeline of their steps. */
function CheckpointMark({ mark, x }: { mark: Mark; x: number }) {
  const { kind, from, to, checkpoints } = mark;
  const only = checkpoints.length === 1 ? checkpoints[0] : undefined;
  const words = kind.replace("-", " ");
  const shape = (
    <g transform={`translate(${x} 0)`} className={styles[kind]}>
      <circle r="8" className={styles.target} />
      {SHAPES[kind]}
      <title>{only ? `Step ${from}: ${words}` : `Steps ${from} to ${to}: ${checkpoints.length} ${words}`}</title>
    </g>
  );
  return only ? (
    <Link to="/checkpoints/$id" params={{ id: only.id }} tabIndex={-1} preload={false}>
      {shape}
    </Link>
  ) : (
    <Link to="." search={(old) => ({ ...old, from, to })} tabIndex={-1} preload={false}>
      {shape}
    </Link>
  );
}

const CROSS = <path d="M-4 -4L4 4M-4 4L4 -4" />;
const SHAPES: Record<MarkKind, ReactNode> = {
  committed: <circle r="4" />,
  "restore-point": (
    <>
      <circle r="7.5" className={styles.ring} />
      <circle r="4" />
    </>
  ),
  unhealthy: <path d="M0 -6L6 0L0 6L-6 0Z" />,
  uploading: <circle r="3.5" />,
  aborted: CROSS,
  deleted: <circle r="2" />,
};

function End({ lane, x }: { lane: Lane; x: number }) {
  const word = endOf(lane);
  const { outcome_detail: detail } = lane.attempt;
  return (
    <g transform={`translate(${x} 0)`} className={styles.end}>
      {endShape(word)}
      <title>{`Attempt ${lane.attempt.number}: ${word} at step ${lane.last}${detail ? `. ${detail}` : ""}`}</title>
    </g>
  );
}

function endShape(word: string): ReactNode {
  if (word === "failed" || word === "lost" || word === "stalled")
    return <path className={styles.killed} d="M-6 -11L6 11M-6 11L6 -11" />;
  if (word === "finished") return <path className={styles.finished} d="M0 -12V12M0 -12L9 -8L0 -4" />;
  if (word === "rolled back") return <path className={styles.stopped} d="M6 -9A7 7 0 1 1 -6 -6M-6 -12V-6H0" />;
  if (word === "preempted" || word === "fenced") return <path className={styles.stopped} d="M0 -12V12" />;
  return <path className={styles.open} d="M-3 -8L6 0L-3 8" />;
}

const LEGEND: [ReactNode, string][] = [
  [<rect key="kept" x="-10" y="-4" width="20" height="8" rx="2" className={styles.kept} />, "steps that the run has"],
  [<rect key="lost" x="-10" y="-4" width="20" height="8" rx="2" fill={LOST} />, "lost steps"],
  [<line key="line" y1="-10" y2="10" className={`${styles.resumed} ${styles.kept}`} />, "lineage: resumed from"],
  [
    <line key="back" y1="-10" y2="10" className={`${styles.resumed} ${styles.kept} ${styles.rollback}`} />,
    "rolled back to",
  ],
  ...(["committed", "restore-point", "unhealthy", "uploading", "aborted", "deleted"] as const).map(
    (kind): [ReactNode, string] => [
      <g key={kind} className={styles[kind]}>
        {SHAPES[kind]}
      </g>,
      { "restore-point": "restore point", unhealthy: "not healthy", deleted: "deleted or in the trash" }[
        kind as string
      ] ?? kind,
    ],
  ),
  [
    <g key="killed" transform="scale(0.7)">
      {endShape("failed")}
    </g>,
    "failed, lost or stalled",
  ],
  [
    <g key="stopped" transform="scale(0.7)">
      {endShape("preempted")}
    </g>,
    "preempted or fenced",
  ],
  [
    <g key="finished" transform="scale(0.7)">
      {endShape("finished")}
    </g>,
    "finished",
  ],
];

export function Legend() {
  return (
    <ul className={styles.legend} aria-label="Signs of the timeline">
      {LEGEND.map(([shape, words]) => (
        <li key={words}>
          <svg aria-hidden="true" width="24" height="20" viewBox="-12 -10 24 20">
            {shape}
          </svg>
          {words}
        </li>
      ))}
    </ul>
  );
}
