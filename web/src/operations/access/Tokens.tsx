import { useMemo, useState } from "react";
import { api, type Schemas, usePages } from "@/api/client";
import { useSession } from "@/api/session";
import { Allowed } from "@/app/Allowed";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Fact, Facts } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { useNow } from "@/components/useNow";
import { Time } from "@/components/values";
import { refresh } from "@/live/refresh";
import styles from "../Operations.module.css";
import { Secret } from "../Secret";
import { CreateToken } from "./CreateToken";

type TokenView = Schemas["TokenView"];

const LIST = "/v1/tokens";

/** The word for what a token is worth now. */
export function stateOf(of: TokenView, now: number): { state: string; tone: "good" | "warn" | "calm" } {
  if (of.revoked_at !== null) return { state: "revoked", tone: "calm" };
  if (of.expires_at !== null && Date.parse(of.expires_at) <= now) return { state: "expired", tone: "warn" };
  return { state: "valid", tone: "good" };
}

export function Tokens() {
  return (
    <Allowed scope="admin" what="Tokens">
      <TokenList />
    </Allowed>
  );
}

function TokenList() {
  const session = useSession();
  const pages = usePages(LIST, { query: { limit: 100 } });
  const [creating, setCreating] = useState(false);
  const [created, setCreated] = useState<Schemas["TokenCreated"] | null>(null);
  const [revoking, setRevoking] = useState<TokenView | null>(null);
  const columns = useMemo(() => makeColumns(setRevoking), []);

  async function revoke(token: TokenView) {
    await api.DELETE("/v1/tokens/{token_id}", { params: { path: { token_id: token.id } } });
    void refresh(LIST);
  }

  return (
    <>
      <div className={styles.bar}>
        <span className="quiet">
          {session.project === null ? "Every token" : `The tokens of ${session.project}`}, the newest first.
        </span>
        <Can scope="admin">
          <button type="button" className="primary" onClick={() => setCreating(true)}>
            New token
          </button>
        </Can>
      </div>
      <DataTable
        label="Tokens"
        columns={columns}
        pages={pages}
        rowKey={(token) => token.id}
        empty={
          <EmptyState title="No token is here">
            <p>“New token” makes one for a training job, for a reader or for an operator.</p>
          </EmptyState>
        }
      />
      {creating && (
        <CreateToken
          onCreated={(token) => {
            setCreated(token);
            void refresh(LIST);
          }}
          onClose={() => setCreating(false)}
        />
      )}
      {created && (
        <Secret
          title={`The token “${created.name}”`}
          secret={created.token}
          name={created.name}
          onClose={() => setCreated(null)}
        >
          <p>
            For {created.project ?? "every project"}; scopes: {created.scopes.join(", ")}. A training script takes it as{" "}
            <code>HOLDFAST_TOKEN</code>.
          </p>
        </Secret>
      )}
      {revoking && (
        <ConfirmDialog
          title={`Revoke the token “${revoking.name}”?`}
          action="Revoke"
          typed={revoking.name}
          onConfirm={() => revoke(revoking)}
          onClose={() => setRevoking(null)}
        >
          <p>
            At once and for good: the next call with it is refused. A training job that uses it can save no more, and a
            page that is signed in with it is signed out.
            {revoking.name === session.name && <strong> This page is signed in with a token of this name.</strong>}
          </p>
          <Facts>
            <Fact name="Token">
              <code>{revoking.id}</code>
            </Fact>
            <Fact name="Project">{revoking.project ?? "every project"}</Fact>
            <Fact name="Scopes">{revoking.scopes.join(", ")}</Fact>
          </Facts>
        </ConfirmDialog>
      )}
    </>
  );
}

function makeColumns(onRevoke: (token: TokenView) => void): Columns<TokenView> {
  const column = createColumnHelper<TokenView>();
  return [
    column.accessor("name", {
      header: "Token",
      size: 170,
      cell: ({ getValue }) => <span title={getValue()}>{getValue()}</span>,
    }),
    column.display({ id: "state", header: "State", size: 95, cell: ({ row }) => <State of={row.original} /> }),
    column.accessor("project", {
      header: "Project",
      size: 120,
      meta: { phone: false },
      cell: ({ getValue }) => getValue() ?? "every project",
    }),
    column.accessor("scopes", {
      header: "Scopes",
      size: 170,
      meta: { phone: false },
      cell: ({ getValue }) => <span title={getValue().join(", ")}>{getValue().join(", ")}</span>,
    }),
    column.accessor("created_at", {
      header: "Made",
      size: 175,
      meta: { phone: false },
      cell: ({ getValue }) => <Time at={getValue()} />,
    }),
    column.accessor("expires_at", {
      header: "Expires",
      size: 175,
      meta: { phone: false },
      cell: ({ getValue }) => (getValue() === null ? "never" : <Time at={getValue()} />),
    }),
    column.accessor("revoked_at", {
      header: "Revoked",
      size: 175,
      meta: { phone: false },
      cell: ({ getValue }) => <Time at={getValue()} />,
    }),
    column.display({
      id: "actions",
      header: "Actions",
      size: 90,
      cell: ({ row: { original: token } }) =>
        token.revoked_at === null && (
          <div className={styles.actions}>
            <Can scope="admin">
              <button
                type="button"
                className="danger"
                aria-label={`Revoke ${token.name}`}
                onClick={() => onRevoke(token)}
              >
                Revoke
              </button>
            </Can>
          </div>
        ),
    }),
  ];
}

function State({ of }: { of: TokenView }) {
  return <StateBadge {...stateOf(of, useNow())} />;
}
