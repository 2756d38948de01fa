import { useState } from "react";
import { type Schemas, useQuery } from "@/api/client";
import { CopyCommand } from "@/components/CopyCommand";
import { Reply } from "@/components/states";
import { Time } from "@/components/values";

type CostView = Schemas["CostView"];

/** The prices that a cost was counted with, by store and storage class; where they are from, and how they are changed. */
export function Prices({ cost }: { cost: CostView }) {
  const [isOpen, setOpen] = useState(false);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary className="quiet">Prices as of {cost.as_of}</summary>
      {isOpen && <Used cost={cost} />}
    </details>
  );
}

function Used({ cost: { lines, currency } }: { cost: CostView }) {
  const list = useQuery("get", "/v1/prices");
  return (
    <>
      {lines.length === 0 ? (
        <p>Nothing is stored that would cost anything.</p>
      ) : (
        <ul aria-label="Prices of a GiB and month">
          {lines.map(({ store, store_kind: kind, storage_class: name, per_gib_month: price }) => (
            <li key={`${store} ${kind} ${name}`}>
              {store === null ? "A store that is no longer attached" : `The ${store} store`} ({kind},{" "}
              {name ?? "the default class"}):{" "}
              {price === null ? "no price, so it is not in the cost" : `${price} ${currency} a GiB and month`}
            </li>
          ))}
        </ul>
      )}
      <Reply of={list} what="where they are from">
        {({ prices, is_default, updated_by, updated_at }) => (
          <p className="quiet">
            {prices.source}{" "}
            {is_default ? (
              "These are the defaults."
            ) : (
              <>
                {updated_by} put them, <Time at={updated_at} />.
              </>
            )}
          </p>
        )}
      </Reply>
      <p>
        To change them for every project, write them to a file, edit it, and put it. That takes a token of every project
        with the scope <code>admin</code>. The costs in hourly samples stay as they were.
      </p>
      <CopyCommand command="holdfast prices show --json > prices.json" label="the command that shows the prices" />
      <CopyCommand command="holdfast prices put --file prices.json" label="the command that puts the prices" />
    </>
  );
}
