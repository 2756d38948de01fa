// A real OpenID provider for the tests: panva's oidc-provider, an OpenID Certified library, with accounts, keys and times
// that a test chooses. The protocol is the library's own. `/test/…` is ours: what an administrator does at a provider.
//
//   node oidc_provider.mjs FOLDER OPTIONS    FOLDER: its node_modules; OPTIONS: JSON, see `Options` in oidc_provider.py
import { randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const [, , folder, text] = process.argv;
const options = JSON.parse(text);
const library = (name) => import(pathToFileURL(path.join(folder, 'node_modules', name)).href);
const { Provider, errors } = await library('oidc-provider/lib/index.js');
const { default: Memory } = await library('oidc-provider/lib/adapters/memory_adapter.js');
const jose = await library('jose/dist/webapi/index.js');

const accounts = new Map(); // subject -> claims
let slowDowns = 0;
let serial = 0;
let keys = []; // the first signs, all are published
let retired = [];

async function newKey() {
  const { privateKey } = await jose.generateKeyPair('RS256', { extractable: true });
  serial += 1;
  // Not a counter alone: a provider that is started again has other keys.
  return { ...await jose.exportJWK(privateKey), kid: `key-${process.pid}-${serial}`, alg: 'RS256', use: 'sig' };
}

class Adapter extends Memory {
  async find(id) {
    // The library knows this answer and never gives it by itself.
    if (this.model === 'DeviceCode' && slowDowns > 0) {
      slowDowns -= 1;
      throw new errors.SlowDown();
    }
    return super.find(id);
  }
}

const token_audience = 'https://resource.example';

function newProvider() {
  const made = new Provider(options.issuer, {
    adapter: Adapter,
    jwks: { keys },
    cookies: { keys: ['of the tests'] },
    claims: {
      openid: ['sub', 'uti'],
      email: ['email', 'email_verified'],
      profile: ['name', 'preferred_username'],
      groups: ['groups'],
    },
    // As the large providers do: what a scope asks for is in the ID token.
    conformIdTokenClaims: false,
    // As Entra ID does: two sign-ins of one second are two.
    findAccount: (ctx, sub) => ({ accountId: sub, claims: async () => ({ sub, uti: randomUUID(), ...accounts.get(sub) }) }),
    features: {
      devInteractions: { enabled: true },
      deviceFlow: { enabled: true },
      clientCredentials: { enabled: true },
      revocation: { enabled: true },
      resourceIndicators: {
        enabled: true,
        defaultResource: (ctx) => (ctx.oidc.body?.grant_type === 'client_credentials' ? token_audience : undefined),
        getResourceServerInfo: (ctx, audience) => ({ audience, scope: '', accessTokenFormat: 'jwt' }),
        useGrantedResource: () => true,
      },
    },
    clientAuthMethods: ['none', 'client_secret_basic', 'client_secret_post'],
    ttl: {
      AccessToken: 600,
      AuthorizationCode: options.code_seconds,
      ClientCredentials: options.id_token_seconds,
      DeviceCode: options.device_code_seconds,
      Grant: 3600,
      IdToken: options.id_token_seconds,
      Interaction: 600,
      Session: 3600,
    },
    clients: options.clients,
  });
  made.on('server_error', (ctx, error) => console.error(error));
  return made;
}

const signed = async ({ claims, header, by }) => {
  const key = { current: () => keys[0], retired: () => retired.at(-1), stranger: newKey }[by]();
  const jwk = await key;
  // A stranger who has read the published keys names one of them.
  const named = { alg: 'RS256', kid: by === 'stranger' ? keys[0].kid : jwk.kid, ...header };
  return new jose.SignJWT(claims).setProtectedHeader(named).sign(await jose.importJWK(jwk, 'RS256'));
};

const administer = {
  '/test/accounts': async ({ sub, claims }) => void accounts.set(sub, claims),
  '/test/tokens': async (wanted) => ({ token: await signed(wanted) }),
  '/test/slow-downs': async ({ count }) => void (slowDowns = count),
  '/test/rotate': async ({ keep }) => {
    retired.push(keys[0]);
    keys = [await newKey(), ...(keep ? keys : [])];
    // What it remembers of sessions, grants and codes is the library's memory, and stays.
    provider = newProvider().callback();
    return { kid: keys[0].kid };
  },
};

keys = [await newKey()];
let provider = newProvider().callback();

const answer = async (request, response) => {
  const act = request.method === 'POST' && administer[request.url];
  if (!act) {
    provider(request, response);
    return;
  }
  let body = '';
  for await (const part of request) body += part;
  const done = await act(JSON.parse(body));
  response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(done ?? {}));
};

const { hostname, port, protocol } = new URL(options.issuer);
const certificate = options.certificate && readFileSync(options.certificate);
const server = protocol === 'https:' ? https.createServer({ cert: certificate, key: certificate }, answer) : http.createServer(answer);
server.listen(Number(port), hostname);
process.on('SIGTERM', () => process.exit(0));
