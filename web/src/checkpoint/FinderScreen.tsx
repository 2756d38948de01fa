import { useQuery as useFound } from "@tanstack/react-query";
import { Navigate, useNavigate, useSearch } from "@tanstack/react-router";
import { type FormEvent, useState } from "react";
import { useQuery } from "@/api/client";
import { useProject } from "@/app/project";
import { Screen } from "@/app/Screen";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { Section } from "@/components/facts/Facts";
import { EmptyState, ErrorState, Loading, Reply } from "@/components/states";
import { Age } from "@/components/values";
import styles from "./checkpoint.module.css";
import { findCheckpoint, readTarget } from "./selector";

const NEWEST = 30;

/** Opens the checkpoint that a text means, and lists those that were committed last. */
export function FinderScreen() {
  const { find } = useSearch({ from: "/checkpoints" });
  const project = useProject();
  return (
    <Screen title="Checkpoints">
      <Finder find={find} key={find} />
      {find !== undefined && <Found find={find} />}
      {project !== undefined && <Newest project={project} key={project} />}
    </Screen>
  );
}

function Finder({ find }: { find: string | undefined }) {
  const navigate = useNavigate({ from: "/checkpoints" });
  const project = useProject();
  const [text, setText] = useState(find ?? "");

  function open(event: FormEvent) {
    event.preventDefault();
    void navigate({ search: (old) => ({ ...old, find: text.trim() || undefined }) });
  }

  return (
    <form className="row" role="search" onSubmit={open}>
      <label htmlFor="find">Find a checkpoint</label>
      <input
        id="find"
        className={styles.finder}
        value={text}
        onChange={(event) => setText(event.target.value)}
        placeholder={`${project ?? "project"}/run@best:loss`}
        aria-describedby="find-help"
        autoComplete="off"
        spellCheck={false}
      />
      <button type="submit" className="primary">
        Open
      </button>
      <span id="find-help" className={`quiet ${styles.help}`}>
        project/run@latest, @1200, @1200#3 for one attempt, @best:loss, @best:accuracy:max, or an id (ck_…)
      </span>
    </form>
  );
}

function Found({ find }: { find: string }) {
  const found = useFound({
    queryKey: ["checkpoint by text", find],
    queryFn: ({ signal }) => findCheckpoint(readTarget(find), signal),
    // What a selector means changes with the next commit.
    staleTime: 0,
    gcTime: 0,
  });
  if (found.data) return <Navigate to="/checkpoints/$id" params={{ id: found.data.id }} replace />;
  if (found.error) return <ErrorState error={found.error} onRetry={() => void found.refetch()} />;
  return <Loading what={find} />;
}

function Newest({ project }: { project: string }) {
  const events = useQuery("get", "/v1/events", {
    params: { query: { project, type: ["checkpoint.committed"], limit: NEWEST } },
  });
  return (
    <Section id="newest" title="Committed last">
      <Reply of={events} what="the newest checkpoints">
        {({ items }) =>
          items.length === 0 ? (
            <EmptyState title="No commit is known">
              <p>A checkpoint is committed when all ranks of a job have sealed their shards.</p>
            </EmptyState>
          ) : (
            <ul className={`panel ${styles.list}`}>
              {items.map(({ id, timestamp, data }) => (
                <li key={id}>
                  {data.checkpoint_id == null ? (
                    `${data.run}, step ${data.step}`
                  ) : (
                    <CheckpointName id={data.checkpoint_id}>
                      {data.run}, step {data.step?.toLocaleString()}
                    </CheckpointName>
                  )}{" "}
                  <span className="quiet">
                    attempt {data.attempt ?? "?"}, <Age since={timestamp} /> ago
                  </span>
                </li>
              ))}
            </ul>
          )
        }
      </Reply>
    </Section>
  );
}
