import { type Schemas, useQuery } from "@/api/client";
import { Figure, Figures } from "@/components/facts/Figures";
import { Reply } from "@/components/states";
import { Nothing } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatCount, formatShare } from "@/format/numbers";
import styles from "./GoodputSection.module.css";
import shared from "./RunScreen.module.css";
import { useGoodput } from "./replies";

type Goodput = Schemas["Goodput"];
type Advice = Schemas["AdviceView"];

const PARTS = [
  ["productive", "in steps that the run still has", "productive_seconds"],
  ["lost", "in steps that were lost", "lost_seconds"],
  ["saving", "blocked by saves", "saving_seconds"],
  ["restoring", "restoring", "restoring_seconds"],
  ["restarting", "restarting", "restarting_seconds"],
  ["idle", "idle", "idle_seconds"],
] as const satisfies readonly (readonly [string, string, keyof Goodput])[];

/** Where the run's time went, and how often it should save. */
export function GoodputSection({ project, run }: { project: string; run: string }) {
  const goodput = useGoodput(project, run);
  const advice = useQuery("get", "/v1/projects/{project}/runs/{run}/advice", { params: { path: { project, run } } });
  return (
    <section aria-labelledby="goodput">
      <h2 id="goodput">Goodput and what was lost</h2>
      <div className={styles.halves}>
        <Reply of={goodput} what="the goodput">
          {(found) => <Spent goodput={found} />}
        </Reply>
        <Reply of={advice} what="the advice">
          {(found) => <SaveAdvice advice={found} />}
        </Reply>
      </div>
    </section>
  );
}

function Spent({ goodput }: { goodput: Goodput }) {
  const wall = goodput.wall_seconds;
  return (
    <div className="panel">
      <Figures>
        <Figure name="Goodput">
          {goodput.goodput === null ? <Nothing why="unknown" /> : formatShare(goodput.goodput)}
        </Figure>
        <Figure name="Steps run">{formatCount(goodput.steps_run)}</Figure>
        <Figure name="Steps lost">{formatCount(goodput.steps_lost)}</Figure>
        <Figure name="Time lost">{formatSeconds(goodput.lost_seconds)}</Figure>
      </Figures>
      {wall > 0 && (
        <>
          <div className={styles.bar} aria-hidden="true">
            {PARTS.map(([part, , seconds]) => (
              <span key={part} className={styles[part]} style={{ flexGrow: goodput[seconds] / wall }} />
            ))}
          </div>
          <table className={shared.table}>
            <caption className="quiet">Where {formatSeconds(wall)} went</caption>
            <tbody>
              {PARTS.map(([part, words, seconds]) => (
                <tr key={part}>
                  <th scope="row">
                    <span className={`${styles.swatch} ${styles[part]}`} aria-hidden="true" />
                    {words}
                  </th>
                  <td className="number">{formatSeconds(goodput[seconds])}</td>
                  <td className="number">{formatShare(goodput[seconds] / wall)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </>
      )}
    </div>
  );
}

function SaveAdvice({ advice }: { advice: Advice }) {
  return (
    <div className="panel">
      <p>
        Save every <strong>{formatSeconds(advice.interval_seconds)}</strong>
        {advice.steps !== null && (
          <>
            {" "}
            (<strong>{formatCount(advice.steps)}</strong> {advice.steps === 1 ? "step" : "steps"})
          </>
        )}
        . A job whose script names no <code>save=</code> does it by itself.
      </p>
      <ul>
        {advice.reasons.map((reason) => (
          <li key={reason}>{reason}</li>
        ))}
      </ul>
      {advice.outlook.length > 0 && (
        <table className={shared.table}>
          <caption className="quiet">Expected loss of training time</caption>
          <thead>
            <tr>
              <th scope="col">Saving every</th>
              <th scope="col" className="number">
                loses
              </th>
            </tr>
          </thead>
          <tbody>
            {advice.outlook.map(({ interval_seconds: interval, lost_share: lost }) => (
              <tr key={interval}>
                <th scope="row">{formatSeconds(interval)}</th>
                <td className="number">{formatShare(lost)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </div>
  );
}
