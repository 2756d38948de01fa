import { type Schemas, useQuery } from "@/api/client";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { Fact, Facts, Section } from "@/components/facts/Facts";
import { ForkSource } from "@/components/facts/ForkSource";
import { Reply } from "@/components/states";
import { Nothing, Time } from "@/components/values";
import { formatCount } from "@/format/numbers";
import { RunName } from "@/runs/RunName";

type CheckpointView = Schemas["CheckpointView"];
type Page = Schemas["Page_CheckpointView_"];

/** The most that is read of a run's attempts, and of the checkpoints after this one. */
const MOST = 500;

/** From which checkpoint its attempt went on, what stands before and after it in the attempt, and who resumed from it. */
export function Lineage({ checkpoint }: { checkpoint: CheckpointView }) {
  const { project, run, step, attempt } = checkpoint;
  const path = { project, run };
  const own = useQuery("get", "/v1/projects/{project}/runs/{run}/attempts/{number}", {
    params: { path: { ...path, number: attempt } },
  });
  const attempts = useQuery("get", "/v1/projects/{project}/runs/{run}/attempts", {
    params: { path, query: { limit: MOST } },
  });
  const before = useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/checkpoints",
    { params: { path, query: { attempt, max_step: step - 1, limit: 1, state: ["committed"] } } },
    { enabled: step > 0 },
  );
  const after = useQuery("get", "/v1/projects/{project}/runs/{run}/checkpoints", {
    params: { path, query: { attempt, min_step: step + 1, limit: MOST, state: ["committed"] } },
  });
  const forks = useQuery("get", "/v1/projects/{project}/runs", {
    params: { path: { project }, query: { forked_from: checkpoint.id, limit: MOST } },
  });
  return (
    <Section id="lineage" title="Lineage">
      <Facts>
        <Fact name={`Attempt ${attempt} went on from`}>
          {checkpoint.forked_from ? (
            <>
              another run: a fork of <ForkSource source={checkpoint.forked_from} />
            </>
          ) : (
            <Reply of={own} what="the attempt">
              {(found) =>
                found.resumed_from === null ? (
                  <span className="quiet">nothing: it began the run, or named no checkpoint</span>
                ) : (
                  <ById id={found.resumed_from} />
                )
              }
            </Reply>
          )}
        </Fact>
        <Fact name="Before it, in this attempt">
          {step === 0 ? (
            <Nothing />
          ) : (
            <Reply of={before} what="the checkpoints before">
              {({ items }) => <OneOf found={items[0]} />}
            </Reply>
          )}
        </Fact>
        <Fact name="After it, in this attempt">
          <Reply of={after} what="the checkpoints after">
            {(page) => <Next page={page} />}
          </Reply>
        </Fact>
        <Fact name="Attempts that resumed from it" wide>
          <Reply of={attempts} what="the attempts">
            {({ items, next_cursor }) => (
              <Resumed
                attempts={items.filter((each) => each.resumed_from === checkpoint.id)}
                isCut={next_cursor != null}
              />
            )}
          </Reply>
        </Fact>
        <Fact name="Runs that were forked from it" wide>
          <Reply of={forks} what="the forks">
            {(page) => <Forks page={page} />}
          </Reply>
        </Fact>
      </Facts>
    </Section>
  );
}

function Forks({ page }: { page: Schemas["Page_RunView_"] }) {
  if (page.items.length === 0) return <span className="quiet">none</span>;
  return (
    <>
      {page.items.map((run, index) => (
        <span key={run.id}>
          {index > 0 && "; "}
          <RunName project={run.project} run={run.name} />
        </span>
      ))}
      {page.next_cursor != null && " and more"}
    </>
  );
}

/** A checkpoint of which only the id is known. */
export function ById({ id }: { id: string }) {
  const found = useQuery("get", "/v1/checkpoints/{checkpoint_id}", { params: { path: { checkpoint_id: id } } });
  if (found.data === undefined) return <CheckpointName id={id}>{id}</CheckpointName>;
  const { step, attempt, state } = found.data;
  return (
    <CheckpointName id={id}>
      step {formatCount(step)}, attempt {attempt}
      {state === "committed" ? "" : `, ${state}`}
    </CheckpointName>
  );
}

function OneOf({ found }: { found: CheckpointView | undefined }) {
  if (found === undefined) return <Nothing />;
  return <CheckpointName id={found.id}>step {formatCount(found.step)}</CheckpointName>;
}

/** The list begins with the newest: the next one is its last, if the page holds them all. */
function Next({ page }: { page: Page }) {
  if (page.next_cursor == null) return <OneOf found={page.items.at(-1)} />;
  return (
    <>
      more than {formatCount(MOST)}; the newest is <OneOf found={page.items[0]} />
    </>
  );
}

function Resumed({ attempts, isCut }: { attempts: Schemas["AttemptView"][]; isCut: boolean }) {
  return (
    <>
      {attempts.length === 0 && <span className="quiet">none{isCut && ` of the newest ${formatCount(MOST)}`}</span>}
      {attempts.map((each, index) => (
        <span key={each.number}>
          {index > 0 && "; "}
          attempt {each.number}, <Time at={each.opened_at} />
          {each.outcome !== null && ` (${each.outcome})`}
        </span>
      ))}
    </>
  );
}
