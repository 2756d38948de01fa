import { Link } from "@tanstack/react-router";
import { Fragment } from "react";
import { Nothing } from "@/components/values";

/** A run's tags; each opens the runs of its project that have it. */
export function Tags({ project, tags }: { project: string; tags: readonly string[] | undefined }) {
  if (!tags?.length) return <Nothing />;
  return (
    <span title={tags.join(", ")}>
      {tags.map((tag, index) => (
        <Fragment key={tag}>
          {index > 0 && ", "}
          <Link to="/runs" search={{ project, tag }}>
            {tag}
          </Link>
        </Fragment>
      ))}
    </span>
  );
}
