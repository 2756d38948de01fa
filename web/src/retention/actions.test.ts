import { eachOf } from "./actions";

it("begins no other once one has failed: the service would be asked for nothing", async () => {
  const begun: number[] = [];
  async function task(item: number) {
    begun.push(item);
    if (item === 1) throw new Error("no connection");
    await new Promise((resolve) => setTimeout(resolve));
  }
  await expect(eachOf([...Array(100).keys()], task)).rejects.toThrow("no connection");
  await new Promise((resolve) => setTimeout(resolve, 20));
  expect(begun).toEqual([0, 1, 2, 3]);
});
