import {inspect} from 'node:util';
import assert from 'node:assert/strict';
import {readFileSync} from 'node:fs';
import test from 'node:test';
import {parse} from 'yaml';
import {Client, LatticekeepError} from '@latticekeep/client';
import {Wire, broken, refusal, silent, success} from './wire.js';

const id = {path: {credential_id: 'cred_1'}};
const seal = {body: {name: 'db', credential_type: 'database', values: {password: 'v'}}};

/** The error of a call that has to fail. */
async function failure(call: Promise<unknown>): Promise<LatticekeepError> {
  const error = await call.then(() => assert.fail('the call succeeded'), (e: unknown) => e);
  assert.ok(error instanceof LatticekeepError, String(error));
  return error;
}

test('every operation of both contracts is a method that sends what the contract says', async () => {
  const wire = new Wire(request => {
    if (request.url.pathname.includes('/audit/tail')) return new Response('');
    return success({access_token: 'access'}, {'Set-Cookie': 'refreshToken=refresh'});
  });
  let operations = 0;
  for (const version of ['v1', 'v2'] as const) {
    const contract = parse(readFileSync(new URL(`../../../api/openapi/${version}.yaml`, import.meta.url), 'utf8'), {maxAliasCount: -1});
    const client = wire.client();
    const methods = client[version] as unknown as Record<string, (input: unknown) => Promise<unknown> & AsyncIterable<unknown>>;
    for (const [path, item] of Object.entries<Record<string, {operationId?: string; security?: []}>>(contract.paths)) {
      for (const [method, {operationId, security}] of Object.entries(item)) {
        if (!operationId) continue;
        operations++;
        if (operationId === 'logout' || operationId === 'refreshSession') await client.v2.login({body: {email: 'a@example.org', password: 'p'}});
        wire.sent.length = 0;
        const given = operationId === 'downloadReport' ? 'https://vault.example.org/api/v2/compliance/download'
          : {path: new Proxy({}, {get: () => 'x y'}), body: {}};
        const called = methods[operationId]?.(given);
        assert.ok(called, `${version} has no method ${operationId}`);
        if (operationId === 'tailAuditLog') for await (const _ of called);
        else await called;
        const request = wire.sent[0];
        assert.equal(`${request?.method} ${request?.url.pathname}`, `${method.toUpperCase()} ${path.replaceAll(/\{\w+\}/g, 'x%20y')}`);
        const isAnonymous = security?.length === 0;
        const named = request?.headers.get('X-API-Key') ?? request?.headers.get('Authorization') ?? request?.headers.get('Cookie');
        assert.equal(named === null, isAnonymous, `${operationId} sends its credential`);
        if (operationId === 'logout') assert.equal(request?.headers.get('Cookie'), 'refreshToken=refresh');
      }
    }
  }
  assert.ok(operations > 100, `${operations} operations`);
});

test('the API key goes into the header that its version reads', async () => {
  const wire = new Wire(() => success());
  const client = wire.client();
  await client.v2.getAccount();
  await client.v1.listKeys();
  const [second, first] = wire.sent;
  assert.deepEqual([second?.headers.get('X-API-Key'), second?.headers.get('Authorization')], ['lk_live_test', null]);
  assert.deepEqual([first?.headers.get('X-API-Key'), first?.headers.get('Authorization')], [null, 'Bearer lk_live_test']);
});

test('ids are escaped, and what cannot be one is not sent', async () => {
  const wire = new Wire(() => success());
  const {v2} = wire.client();
  await v2.unsealCredentialByName({path: {name: 'shop/prod/größe?#%2e'}});
  assert.equal(wire.sent[0]?.url.pathname, '/api/v2/vault/by-name/shop%2Fprod%2Fgr%C3%B6%C3%9Fe%3F%23%252e');
  for (const name of ['', '.', '..', '\ud800']) {
    const error = await failure(v2.unsealCredentialByName({path: {name}}));
    assert.ok(error.isInvalid);
  }
  assert.equal(wire.sent.length, 1);
});

test('the query has what is given', async () => {
  const wire = new Wire(() => success());
  await wire.client().v2.listCredentials({query: {prefix: 'a b/', limit: 5, total: true}});
  assert.equal(wire.sent[0]?.url.search, '?prefix=a+b%2F&limit=5&total=true');
});

test('errors say what is to be done and nothing of the request', async () => {
  const statuses = [400, 401, 403, 404, 409, 412, 413, 415, 422, 500];
  const getters = ['isInvalid', 'isUnauthenticated', 'isForbidden', 'isNotFound', 'isConflict', 'isPreconditionFailed', 'isInvalid', 'isInvalid', 'isInvalid', ''];
  for (const [i, status] of statuses.entries()) {
    const error = await failure(new Wire(() => refusal(status)).client().v2.unsealCredentialByName({path: {name: 'secret-name'}}));
    assert.deepEqual([error.status, error.code, error.message, error.requestId], [status, status, 'the reason', 'req_1']);
    const isTrue = Object.entries(Object.getOwnPropertyDescriptors(LatticekeepError.prototype))
      .filter(([, property]) => property.get?.call(error) === true).map(([name]) => name).join();
    assert.equal(isTrue, getters[i]);
  }
  const page = new Wire(() => new Response('<html>', {status: 502, statusText: 'Bad Gateway', headers: {'X-Request-ID': 'req_2'}}));
  const ofProxy = await failure(page.client().v2.getAccount());
  assert.deepEqual([ofProxy.status, ofProxy.code, ofProxy.message, ofProxy.requestId], [502, 0, 'bad gateway', 'req_2']);

  const lost = await failure(new Wire(() => { throw broken(); }).client({retries: 0}).v2.unsealCredentialByName({path: {name: 'secret-name'}}));
  assert.ok(lost.isNoAnswer);
  assert.doesNotMatch(`${lost.stack} ${lost.cause}`, /secret-name|by-name/);
  const parser = Object.assign(new Error('Invalid character in chunk size'), {code: 'HPE_INVALID_CHUNK_SIZE', data: '{"password":"hunter2"}'});
  const garbled = await failure(new Wire(() => { throw new TypeError('fetch failed', {cause: parser}); }).client({retries: 0}).v2.getAccount());
  assert.match(inspect(garbled), /HPE_INVALID_CHUNK_SIZE/);
  assert.doesNotMatch(inspect(garbled, {showHidden: true, depth: 10}), /hunter2/);
  const half = new ReadableStream({pull: controller => controller.error(broken())});
  assert.ok((await failure(new Wire(() => new Response(half)).client().v2.getAccount())).isNoAnswer);
});

test('an error does not repeat an API key that cannot be sent', async () => {
  const wire = new Wire(() => success());
  const error = await failure(wire.client({apiKey: 'lk_live_\nsecret'}).v2.getAccount());
  assert.ok(error.isInvalid);
  assert.doesNotMatch(String(error.stack), /secret/);
  assert.equal(wire.sent.length, 0);
});

test('redirects are not followed', async () => {
  const wire = new Wire(() => new Response(null, {status: 307, headers: {Location: 'https://elsewhere.example.org/'}}));
  assert.equal((await failure(wire.client().v2.getAccount())).status, 307);
  assert.equal(wire.sent.length, 1);
});

test('a call that got 429 waits as long as the server asks, at most two minutes', async () => {
  const wire = new Wire((_, n) => n === 1 ? refusal(429, {'Retry-After': '7'}) : n === 2 ? refusal(429) : success());
  await wire.client().v2.createKey({body: {name: 'orders'}}); // nothing was done, so any call is repeated
  assert.equal(wire.sent.length, 3);
  const [first = 0, second = 0] = wire.pauses;
  assert.ok(first >= 7000 && first <= 7200, `first pause ${first}`);
  assert.ok(second >= 200 && second <= 400, `second pause ${second}`);

  const dated = new Wire((_, n) => n === 1 ? refusal(429, {'Retry-After': 'Sat, 21 Nov 2026 10:00:30 GMT'}) : success());
  await dated.client().v2.getAccount();
  assert.ok(dated.pauses[0]! >= 30_000 && dated.pauses[0]! <= 30_200, `pause ${dated.pauses}`);

  const long = new Wire(() => refusal(429, {'Retry-After': '121'}));
  const error = await failure(long.client().v2.getAccount());
  assert.deepEqual([error.isRateLimited, error.retryAfter, long.pauses.length], [true, 121, 0]);
});

test('after an unknown outcome only what is safe is repeated', async () => {
  const cases: [string, (v2: Client['v2']) => Promise<unknown>, number][] = [
    ['a read', v2 => v2.getAccount(), 5],
    ['an encryption', v2 => v2.encryptData({body: {data: 'x'}}), 5],
    ['a complete state', v2 => v2.putHistoryRule({body: {path: 'a', versions_kept: 1}}), 5],
    ['a seal', v2 => v2.sealCredential(seal), 5],
    ['a replacement', v2 => v2.replaceCredential({...id, body: {values: {k: 'v'}}}), 1],
    ['a deletion', v2 => v2.deleteCredential(id), 1],
    ['a backup', v2 => v2.takeBackup({body: {recipient: 'age1pq'}}), 1],
    ['a probe', v2 => v2.getReadiness(), 1],
  ];
  for (const [what, call, attempts] of cases) {
    for (const answer of [() => refusal(503), () => { throw broken(); }]) {
      const wire = new Wire(answer);
      const error = await failure(call(wire.client().v2));
      assert.ok(error.isUnavailable || error.isNoAnswer, what);
      assert.equal(wire.sent.length, attempts, what);
      for (const [i, pause] of wire.pauses.entries()) assert.ok(pause >= 100 * 2 ** i && pause <= 200 * 2 ** i, `pause ${i} of ${what}: ${pause}`);
    }
  }
  const probe = new Wire(() => refusal(429, {'Retry-After': '1'}));
  await failure(probe.client().v2.getHealth());
  assert.equal(probe.sent.length, 1);
});

test('a seal carries one idempotency key through all its attempts', async () => {
  const wire = new Wire((_, n) => n % 2 === 1 ? refusal(503) : success());
  const {v2} = wire.client();
  await v2.sealCredential(seal);
  await v2.sealCredential({...seal, idempotencyKey: 'mine'});
  const keys = wire.sent.map(request => request.headers.get('Idempotency-Key'));
  assert.match(keys[0] ?? '', /^[0-9a-f-]{36}$/);
  assert.deepEqual(keys, [keys[0], keys[0], 'mine', 'mine']);
});

test('entity tags come with answers and go into changes', async () => {
  const wire = new Wire(() => success({version: 1}, {ETag: '"tag"'}));
  const {v2} = wire.client();
  const {etag, body} = await v2.call('unsealCredential', id);
  assert.deepEqual([etag, body.version], ['"tag"', 1]);
  await v2.replaceCredential({...id, body: {values: {k: 'v'}}, ifMatch: etag});
  await v2.putCredentialByName({path: {name: 'db'}, body: {credential_type: 't', values: {k: 'v'}}, ifNoneMatch: '*'});
  assert.deepEqual([wire.sent[1]?.headers.get('If-Match'), wire.sent[2]?.headers.get('If-None-Match')], ['"tag"', '*']);
});

test('a signal ends attempts and pauses', async () => {
  const before = AbortSignal.abort(new Error('changed my mind'));
  const wire = new Wire(() => success());
  await assert.rejects(wire.client().v2.getAccount({signal: before}), /changed my mind/);
  assert.equal(wire.sent.length, 0);

  const during = new AbortController();
  const slow = new Wire(() => { during.abort(new Error('too late')); return success(); });
  await assert.rejects(slow.client().v2.getAccount({signal: during.signal}), /too late/);

  // The pause is a real one, of a minute.
  const pause = new AbortController();
  const client = new Client('https://vault.example.org', {fetch: async () => {
    setImmediate(() => pause.abort(new Error('no patience')));
    return refusal(429, {'Retry-After': '60'});
  }});
  await assert.rejects(client.v2.getAccount({signal: pause.signal}), /no patience/);
});

test('an attempt ends by itself, and is not repeated', async () => {
  const wire = new Wire(silent);
  const error = await failure(wire.client({timeout: 1}).v2.getAccount());
  assert.deepEqual([error.isNoAnswer, wire.sent.length], [true, 1]);
});

test('the base URL must keep secrets', () => {
  for (const url of ['https://v.example.org', 'https://v.example.org/base/', 'http://localhost:1', 'http://127.0.0.9', 'http://[::1]:80']) new Client(url);
  new Client('http://vault.internal', {plainHTTP: true});
  for (const url of ['nowhere', 'ftp://v.example.org', 'https://u:p@v.example.org', 'https://v.example.org?a', 'https://v.example.org#a', 'http://v.example.org', 'http://localhost.example.org']) {
    assert.throws(() => new Client(url), (e: unknown) => e instanceof LatticekeepError && e.isInvalid && !e.message.includes(`//${url}`), url);
  }
  assert.throws(() => new Client('https://v.example.org', {retries: -1}), /retries/);
});

test('pages are read to the last, past empty ones', async () => {
  const pages: [object[], string?][] = [[[{name: 'a'}], 'one'], [[], 'two'], [[{name: 'b'}]]];
  const wire = new Wire((_, n) => success({credentials: pages[n - 1]?.[0], next_cursor: pages[n - 1]?.[1]}));
  const names: string[] = [];
  for await (const page of wire.client().v2.paginate('listCredentials', {query: {limit: 1}})) names.push(...page.credentials.map(c => c.name));
  assert.deepEqual(names, ['a', 'b']);
  assert.deepEqual(wire.sent.map(r => r.url.search), ['?limit=1', '?limit=1&cursor=one', '?limit=1&cursor=two']);

  const inBody = new Wire((_, n) => success(n === 1 ? {next_cursor: 'next'} : {}));
  for await (const _ of inBody.client().v2.paginate('tryAccessChange', {body: {change: 'unbind_policies', subject: 'user_1'}}));
  assert.deepEqual(inBody.sent.map(r => JSON.parse(r.body).cursor), [undefined, 'next']);
});

test('the tail yields entries, over any cuts of the stream, and goes on behind the last', async () => {
  const text = ': comment\n\nid: 7\ndata: {"sequence":7,"event_type":"Größe"}\n\nid: 8\ndata: {"sequence":8}\n\nid: 9\ndata: {"seq';
  const bytes = new TextEncoder().encode(text);
  const wire = new Wire(() => new Response(new ReadableStream({
    start(controller) {
      for (const b of bytes) controller.enqueue(Uint8Array.of(b));
      controller.close();
    },
  }), {headers: {'Content-Type': 'text/event-stream'}}));
  const entries = [];
  for await (const entry of wire.client().v2.tailAuditLog({lastEventId: 6, query: {wait: 0}})) entries.push(entry);
  assert.deepEqual(entries, [{sequence: 7, event_type: 'Größe'}, {sequence: 8}]);
  assert.deepEqual([wire.sent[0]?.headers.get('Last-Event-ID'), wire.sent[0]?.url.search], ['6', '?wait=0']);
});

test('leaving the tail closes it', async () => {
  let cancelled = false;
  const wire = new Wire(() => new Response(new ReadableStream({
    pull: controller => controller.enqueue(new TextEncoder().encode('data: {"sequence":1}\n\n')),
    cancel: () => { cancelled = true; },
  })));
  for await (const _ of wire.client().v2.tailAuditLog()) break;
  assert.ok(cancelled);
});

test('a stream has no limit of time, and says when it is cut short or given up', async () => {
  const half = () => new Response(new ReadableStream({
    pull(controller) {
      controller.enqueue(Uint8Array.of(1));
      queueMicrotask(() => controller.error(broken()));
    },
  }));
  const signals: unknown[] = [];
  const {v2} = new Client('https://vault.example.org', {fetch: async (_, init) => {
    signals.push(init?.signal);
    return half();
  }});
  const cut = await v2.exportAuditLog();
  assert.ok((await failure(new Response(cut).arrayBuffer())).isNoAnswer);
  assert.deepEqual(signals, [undefined]);

  const controller = new AbortController();
  const left = await v2.takeBackup({body: {recipient: 'age1pq'}, signal: controller.signal});
  controller.abort(new Error('no longer needed'));
  await assert.rejects(new Response(left).arrayBuffer(), /no longer needed/);
});

test('a report is downloaded without a credential, from where its URL says', async () => {
  const wire = new Wire(() => new Response('pdf'));
  const {v2} = wire.client();
  const report = await v2.downloadReport('https://bucket.example.org/report?signature=x%2By');
  assert.equal(await new Response(report).text(), 'pdf');
  const [request] = wire.sent;
  assert.deepEqual([request?.url.href, request?.headers.get('X-API-Key')], ['https://bucket.example.org/report?signature=x%2By', null]);
  for (const url of ['report', 'ftp://bucket.example.org', 'http://bucket.example.org', 'https://u:p@bucket.example.org']) {
    assert.ok((await failure(v2.downloadReport(url))).isInvalid, url);
  }
});

// ---- sessions

const login = {body: {email: 'a@example.org', password: 'p'}};

/** A server with users. Only the newest access token is good, and a refresh token is good once. */
class Users extends Wire {
  access = '';
  refresh = '';
  /** Comes before each answer of data. */
  held: Promise<void> | undefined;
  /** Answers the next refreshes, where it is set. */
  refuse: (() => Response | Promise<Response>) | undefined;
  #serial = 0;

  constructor() {
    super(async request => {
      switch (request.url.pathname) {
        case '/api/v2/auth/login': return this.#tokens();
        case '/api/v2/auth/logout': return success();
        case '/api/v2/auth/refresh':
          if (this.refuse) return this.refuse();
          return request.headers.get('Cookie') === `refreshToken=${this.refresh}` ? this.#tokens() : refusal(401);
      }
      const answer = request.headers.get('Authorization') === `Bearer ${this.access}` ? success() : refusal(401);
      await this.held;
      return answer;
    });
  }

  #tokens(): Response {
    this.#serial++;
    [this.access, this.refresh] = [`access${this.#serial}`, `refresh${this.#serial}`];
    return this.answer();
  }

  /** The newest tokens, as an answer. */
  answer(): Response {
    return success({access_token: this.access}, {'Set-Cookie': `refreshToken=${this.refresh}; Path=/; HttpOnly`});
  }

  expire(): void {
    this.access = 'none';
  }

  sentTo(path: string): number {
    return this.sent.filter(request => request.url.pathname === path).length;
  }

  get refreshes(): number {
    return this.sentTo('/api/v2/auth/refresh');
  }
}

async function signedIn(options = {}) {
  const users = new Users();
  const {v2} = users.client(options);
  await v2.login(login);
  return {users, v2};
}

test('one refresh serves all calls in flight, and each is sent once more', async () => {
  const {users, v2} = await signedIn();
  users.expire();
  await Promise.all(Array.from({length: 10}, () => v2.getAccount()));
  assert.deepEqual([users.refreshes, users.sentTo('/api/v2/auth/me')], [1, 20]);
  assert.ok(users.sent.every(request => request.headers.get('X-API-Key') === null));
});

test('a 401 that the new token does not cure is final', async () => {
  const {users, v2} = await signedIn();
  users.expire();
  users.refuse = () => users.answer(); // a token that is not good either
  users.answer = () => success({access_token: 'bad'}, {'Set-Cookie': 'refreshToken=next'});
  assert.ok((await failure(v2.getAccount())).isUnauthenticated);
  assert.deepEqual([users.refreshes, users.sentTo('/api/v2/auth/me')], [1, 2]);
});

test('when the session has ended, calls fail and no API key takes its place', async () => {
  const {users, v2} = await signedIn();
  users.expire();
  users.refresh = 'used by somebody else';
  for (let i = 0; i < 2; i++) assert.ok((await failure(v2.getAccount())).isUnauthenticated);
  assert.equal(users.refreshes, 1);
  assert.ok(users.sent.every(request => request.headers.get('X-API-Key') === null));
});

test('a call does not go on as another principal', async () => {
  const {users, v2} = await signedIn();
  users.expire();
  let release = (): void => {};
  users.held = new Promise(resolve => { release = resolve; });
  const old = failure(v2.getAccount()); // sent with the first session's token
  await v2.login(login);
  release();
  assert.ok((await old).isUnauthenticated);
  assert.deepEqual([users.refreshes, users.sentTo('/api/v2/auth/me')], [0, 1]);
  await v2.getAccount();
});

test('a call that waits keeps its principal', async () => {
  let busy = true;
  const wire = new Wire(() => busy ? refusal(429, {'Retry-After': '5'}) : success({access_token: 'a'}, {'Set-Cookie': 'refreshToken=r'}));
  const {v2} = wire.client({sleep: async () => {
    if (!busy) return;
    busy = false;
    await v2.login(login);
  }});
  await v2.getAccount(); // begun with the API key
  assert.deepEqual(wire.sent.map(r => [r.url.pathname, r.headers.get('X-API-Key')]), [
    ['/api/v2/auth/me', 'lk_live_test'], ['/api/v2/auth/login', null], ['/api/v2/auth/me', 'lk_live_test'],
  ]);
  await v2.getAccount();
  assert.equal(wire.sent.at(-1)?.headers.get('Authorization'), 'Bearer a');
});

test('a renewal that gets no answer says so', async () => {
  const {users, v2} = await signedIn({timeout: 1});
  users.expire();
  users.refuse = silent;
  assert.ok((await failure(v2.getAccount())).isNoAnswer);
});

test('a renewal that fails for a passing reason is told, and tried again by the next call', async () => {
  const {users, v2} = await signedIn();
  users.expire();
  users.refuse = () => refusal(503);
  assert.ok((await failure(v2.getAccount())).isUnavailable);
  assert.equal(users.refreshes, 1); // whether the token was used up is unknown
  users.refuse = undefined;
  await v2.getAccount();
});

test('a call that waits for a renewal can give up, and the renewal goes on for others', async () => {
  const {users, v2} = await signedIn();
  const [current, impatient] = [users.access, new AbortController()];
  users.expire();
  let release = (): void => {};
  const asked = new Promise<void>(asks => {
    users.refuse = () => new Promise(resolve => {
      asks();
      release = () => {
        users.access = current;
        resolve(users.answer());
      };
    });
  });
  const patient = v2.getAccount(), other = v2.getAccount({signal: impatient.signal});
  await asked;
  impatient.abort(new Error('no patience'));
  await assert.rejects(other, /no patience/);
  release();
  await patient;
  assert.equal(users.refreshes, 1);
});

test('a refresh that has to wait longer than an exchange may take ends at once', async () => {
  const {users, v2} = await signedIn();
  users.refuse = () => refusal(429, {'Retry-After': '40'});
  assert.ok((await failure(v2.refreshSession())).isRateLimited);
  assert.deepEqual(users.pauses, []);
});

test('after a logout the API key is back', async () => {
  const {users, v2} = await signedIn();
  await v2.logout();
  const out = users.sent.at(-1);
  assert.deepEqual([out?.headers.get('Authorization'), out?.headers.get('Cookie')], ['Bearer access1', 'refreshToken=refresh1']);
  await failure(v2.getAccount());
  assert.equal(users.sent.at(-1)?.headers.get('X-API-Key'), 'lk_live_test');
  const before = users.sent.length;
  await v2.logout(); // nobody is signed in
  assert.equal(users.sent.length, before);
  assert.ok((await failure(v2.refreshSession())).isUnauthenticated);
});
