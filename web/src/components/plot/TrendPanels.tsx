import { Plot } from "./Plot";
import styles from "./Trends.module.css";
import type { Trend } from "./trends";

const HEIGHT_PX = 130;
/** The cursor stands at the same hour in all of them. */
const SYNC_KEY = "trends";

interface TrendPanelsProps {
  /** The begin of each hour, in seconds since 1970. */
  x: number[];
  trends: readonly Trend[];
  /** Hours of which the service took no sample. */
  missed: number;
}

/** Trends beside each other: in words, as a line and as a table. */
export function TrendPanels({ x, trends, missed }: TrendPanelsProps) {
  return (
    <>
      <div className={styles.plots}>
        {trends.map(({ title, told, series }) => (
          <div className="panel" key={title}>
            <p className={styles.told}>{told}</p>
            <Plot title={title} x={x} xLabel="Hour" time series={series} heightPx={HEIGHT_PX} syncKey={SYNC_KEY} />
          </div>
        ))}
      </div>
      {missed > 0 && (
        <p className="quiet">
          The service took no samples in {missed} {missed === 1 ? "hour" : "hours"} of this time: there the lines have
          gaps.
        </p>
      )}
    </>
  );
}
