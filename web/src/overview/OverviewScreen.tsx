import { useQuery } from "@/api/client";
import { useSession } from "@/api/session";
import { useProject, useProjects } from "@/app/project";
import { Screen } from "@/app/Screen";
import { CopyCommand } from "@/components/CopyCommand";
import { Figure, Figures } from "@/components/facts/Figures";
import { Prices } from "@/components/facts/Prices";
import { EmptyState, Reply } from "@/components/states";
import { Bytes, Money } from "@/components/values";
import { RunsTable } from "@/runs/RunsTable";
import { AttentionElsewhere, AttentionList } from "./AttentionList";
import styles from "./OverviewScreen.module.css";
import { Trends } from "./Trends";

/** What needs attention, then what trains. */
export function OverviewScreen() {
  const project = useProject();
  const projects = useProjects();
  return (
    <Screen title="Overview">
      {project === undefined ? (
        <Reply of={projects} what="the projects">
          {() => (
            <EmptyState title="No project is here yet">
              <p>A project is made with its first token. Then a training script saves into it.</p>
              <CopyCommand command="holdfast projects create my-project" label="the command that makes a project" />
            </EmptyState>
          )}
        </Reply>
      ) : (
        <OfProject project={project} key={project} />
      )}
    </Screen>
  );
}

function OfProject({ project }: { project: string }) {
  return (
    <>
      <section aria-labelledby="attention">
        <h2 id="attention">Needs attention</h2>
        <AttentionList project={project} />
      </section>
      <OtherProjects project={project} />
      <section aria-labelledby="live">
        <h2 id="live">Live runs</h2>
        <RunsTable
          project={project}
          statuses={["training", "stalled"]}
          empty={
            <EmptyState title="No run is training">
              <p>A run is live from the moment when its training script opens the checkpointer.</p>
            </EmptyState>
          }
        />
      </section>
      <section aria-labelledby="bytes">
        <h2 id="bytes">Bytes and cost</h2>
        <BytesAndCost project={project} />
      </section>
      <Trends project={project} />
    </>
  );
}

function OtherProjects({ project }: { project: string }) {
  const session = useSession();
  const projects = useProjects();
  const others = (projects.data?.items ?? []).filter((each) => each.name !== project);
  if (session.project !== null || others.length === 0) return null;
  return (
    <section aria-labelledby="elsewhere">
      <h2 id="elsewhere">In other projects</h2>
      <AttentionElsewhere project={project} />
    </section>
  );
}

function BytesAndCost({ project }: { project: string }) {
  const params = { params: { path: { project } } };
  const usage = useQuery("get", "/v1/projects/{project}/usage", params);
  const cost = useQuery("get", "/v1/projects/{project}/cost", params);
  const found = useQuery("get", "/v1/projects/{project}", params);
  const session = useSession();
  return (
    <div className={styles.figures}>
      <Reply of={usage} what="the bytes">
        {(bytes) => (
          <Figures panel>
            <Figure name="Stored, in all stores">
              <Bytes count={bytes.stored_bytes} />
            </Figure>
            <Figure name="Counts against the quota">
              <Bytes count={found.data?.quota_used_bytes} />
            </Figure>
            <Figure name="Quota">
              {found.data?.quota_bytes === null ? "none" : <Bytes count={found.data?.quota_bytes} />}
            </Figure>
            <Figure name="States in the trainer">
              <Bytes count={bytes.logical_bytes} />
            </Figure>
            <Figure name="Not sent, deduplicated">
              <Bytes count={bytes.deduplicated_bytes} />
            </Figure>
            <Figure name="In the trash">
              <Bytes count={bytes.trashed_bytes} />
            </Figure>
            <Figure name="Pending collection">
              <Bytes count={bytes.pending_collection_bytes} />
            </Figure>
          </Figures>
        )}
      </Reply>
      <Reply of={cost} what="the cost">
        {(money) => (
          <div>
            <Figures panel>
              <Figure name="Per month, as stored now">
                <Money amount={money.per_month} currency={money.currency} />
              </Figure>
              {money.unpriced_bytes > 0 && (
                <Figure name="Without a price">
                  <Bytes count={money.unpriced_bytes} />
                  {session.scopes.includes("admin") && " – set one with holdfast prices"}
                </Figure>
              )}
            </Figures>
            <Prices cost={money} />
          </div>
        )}
      </Reply>
    </div>
  );
}
