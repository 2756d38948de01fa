import styles from "../checkpoint.module.css";
import { type Box, cutAxes, type Tensor } from "./layout";

const WIDTH = 600;
const HEIGHT = 160;
/** Below it a rank's number does not fit. */
const LABEL_PX = 22;

/** The boxes of a tensor as a picture, along the first two axes that it is cut in. The table below says the same. */
export function ShardMap({ tensor, boxes }: { tensor: Tensor; boxes: Box[] }) {
  const [down, across] = cutAxes(tensor);
  if (down === undefined) return null;
  const high = tensor.shape[down] ?? 1;
  const wide = across === undefined ? 1 : (tensor.shape[across] ?? 1);
  // One cut is drawn from left to right.
  const place = (box: Box) =>
    across === undefined
      ? {
          x: ((box.offsets[down] ?? 0) / high) * WIDTH,
          y: 0,
          width: ((box.shape[down] ?? 0) / high) * WIDTH,
          height: HEIGHT / 3,
        }
      : {
          x: ((box.offsets[across] ?? 0) / wide) * WIDTH,
          y: ((box.offsets[down] ?? 0) / high) * HEIGHT,
          width: ((box.shape[across] ?? 0) / wide) * WIDTH,
          height: ((box.shape[down] ?? 0) / high) * HEIGHT,
        };
  const height = across === undefined ? HEIGHT / 3 : HEIGHT;
  const axes = across === undefined ? `axis ${down}` : `axis ${down} down, axis ${across} across`;
  return (
    <figure className={styles.map}>
      <svg viewBox={`0 0 ${WIDTH} ${height}`} role="img" aria-label={`The boxes of ${tensor.name}, ${axes}`}>
        {boxes.map((box) => {
          const { x, y, width, height: tall } = place(box);
          return (
            <g key={`${box.offsets}/${box.shape}`}>
              <rect x={x} y={y} width={width} height={tall} />
              {width > LABEL_PX && tall > LABEL_PX / 2 && (
                <text x={x + width / 2} y={y + tall / 2}>
                  {box.ranks.length > 2 ? `${box.ranks[0]}…` : box.ranks.join(", ")}
                </text>
              )}
            </g>
          );
        })}
      </svg>
      <figcaption className="quiet">Which rank holds which part, {axes}</figcaption>
    </figure>
  );
}
