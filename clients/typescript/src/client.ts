import * as tables from './generated/operations.js';
import type * as v1 from './generated/v1.js';
import type * as v2 from './generated/v2.js';
import type {Arguments, BodyOf, CallOptions, Input, Methods, Operation, Paged, Table} from './contract.js';
import {LatticekeepError, invalid, noAnswer} from './error.js';
import {Session, type Credential, type Tokens} from './session.js';
import {Transport, refreshCookie, sleep, type Call, type Platform} from './transport.js';

/** Settings of a {@link Client}. All of them may be left out. */
export interface Options extends Partial<Platform> {
  /** The API key that calls carry. */
  apiKey?: string | undefined;
  /** How many times a call may be repeated. The default is 4; 0 sends each call once. */
  retries?: number | undefined;
  /** How long one attempt may take, in milliseconds. The default is slightly longer than the server's own limit. Streams have none. */
  timeout?: number | undefined;
  /** Allows plain HTTP to a host that is not loopback. Credentials and secrets then cross the network unencrypted. */
  plainHTTP?: boolean | undefined;
}

const defaultRetries = 4, defaultTimeout = 65_000;

// renewTimeout bounds one exchange of the refresh token, in milliseconds.
const renewTimeout = 30_000;

/** An answer with what its headers say. */
export interface Answer<Body> {
  readonly status: number;
  readonly headers: Headers;
  /** The entity tag of the credential that was read, for `ifMatch` of a change. */
  readonly etag: string | undefined;
  readonly body: Body;
}

type Tables = typeof tables;
type SessionOperations = 'login' | 'logout' | 'refreshSession';

/** The calls of one version of the interface. */
export interface Calls<Operations, Rows> {
  /** Calls an operation by its name. It resolves to the answer with its headers, where the method has the body alone. */
  call<Id extends Exclude<keyof Operations & keyof Rows, SessionOperations>>(
    id: Id, ...input: Arguments<Operations[Id]>): Promise<Answer<BodyOf<Operations[Id], Rows[Id]>>>;

  /** Reads the pages of a list. A page may be short, or even empty, and not be the last. */
  paginate<Id extends keyof Operations & Paged<Rows>>(
    id: Id, ...input: Arguments<Operations[Id]>): AsyncGenerator<BodyOf<Operations[Id], Rows[Id]>, void, undefined>;
}

/** A method for each operation of version 1, which accepts only an API key. */
export type V1 = Methods<v1.operations, Tables['v1']> & Calls<v1.operations, Tables['v1']>;

type Login = Input<v2.operations['login']>;
type TokenAnswer = v2.components['schemas']['TokenAnswer'];
export type AuditEntry = v2.components['schemas']['AuditEntry'];

/** A method for each operation of version 2. */
export interface V2 extends Omit<Methods<v2.operations, Tables['v2']>, SessionOperations | 'downloadReport' | 'tailAuditLog'>,
  Calls<v2.operations, Tables['v2']> {
  /** Begins a session. From then on the methods act as the user. */
  login(input: Login): Promise<TokenAnswer>;
  /** Exchanges the refresh token now. This is seldom necessary, because a rejected call does it by itself. */
  refreshSession(options?: CallOptions): Promise<TokenAnswer>;
  /**
   * Ends the session. It succeeds also when the session has already ended. Afterwards the methods carry the API key again,
   * if there is one.
   */
  logout(options?: CallOptions): Promise<void>;
  /**
   * Downloads from a URL that `getComplianceReport` answered, at the deployment or in the bucket where it keeps reports. The
   * URL itself authorises the call, so no credential is sent.
   */
  downloadReport(url: string | URL, options?: CallOptions): Promise<ReadableStream<Uint8Array>>;
  /**
   * Follows the tenant's own entries as they are written, until the server or the signal ends the tail. To go on later, begin
   * again with `lastEventId` set to the sequence that was read last.
   */
  tailAuditLog(input?: Input<v2.operations['tailAuditLog']>): AsyncGenerator<AuditEntry, void, undefined>;
}

/**
 * Talks to one deployment as one principal.
 *
 * With an API key every call carries the key. After `v2.login` the calls of version 2 carry the user's access token
 * instead, until `v2.logout`. When the server rejects the token as expired, one exchange of the refresh token serves all
 * calls in flight, and each is sent once more. Tokens are in memory only.
 *
 * A call that got status 429 is repeated after the time that the server asks for. After a 503 or a broken connection the
 * outcome is unknown: then only what is safe to repeat is repeated. Every failure is a {@link LatticekeepError}, except
 * that an aborted call rejects with the reason of its signal.
 */
export class Client {
  readonly v1: V1;
  readonly v2: V2;

  /** Error: the URL, such as https://vault.example.org, cannot be used. */
  constructor(baseURL: string | URL, options: Options = {}) {
    const {apiKey, retries = defaultRetries, timeout = defaultTimeout, plainHTTP = false} = options;
    if (!Number.isInteger(retries) || retries < 0) throw invalid('making the client: the number of retries is not a whole number from 0');
    const platform = {fetch: options.fetch ?? fetch, now: options.now ?? Date.now, sleep: options.sleep ?? sleep};
    const shared = {...platform, base: checkURL(baseURL, plainHTTP), retries, timeout};

    const key = (header: string, value: string) => apiKey ? {header, value: value + apiKey} : undefined;
    const first = new Caller(new Transport({...shared, credential: () => key('Authorization', 'Bearer ')}), tables.v1);
    this.v1 = {...first.methods(), ...first.calls()} as unknown as V1;

    const session: Session = new Session(refresh => exchange(transport, refresh, platform.now));
    // Never both: the server treats a request with two credentials as one without.
    const credential = () => session.credential ?? key('X-API-Key', '');
    const transport = new Transport({...shared, credential, renew: (refused, signal) => session.renew(refused, signal)});
    const second = new Caller(transport, tables.v2);
    this.v2 = {...second.methods(), ...second.calls(), ...sessionMethods(transport, session), ...streamMethods(second, plainHTTP)} as unknown as V2;
  }
}

/** Returns the URL to which paths are appended. */
function checkURL(base: string | URL, plainHTTP: boolean): string {
  let u: URL;
  try {
    u = new URL(base);
  } catch {
    throw invalid('making the client: the base URL is not one like https://vault.example.org');
  }
  if (u.protocol !== 'https:' && u.protocol !== 'http:') throw invalid('making the client: the base URL is not one like https://vault.example.org');
  if (u.username || u.password || u.search || u.hash) throw invalid('making the client: the base URL has a user, a query or a fragment: leave them out');
  if (isExposed(u, plainHTTP)) throw invalid('making the client: plain HTTP to another machine shows it every secret: use https, or plainHTTP');
  return u.href.replace(/\/+$/, '');
}

const isExposed = (u: URL, plainHTTP: boolean) =>
  u.protocol === 'http:' && !plainHTTP && !/^(localhost|127\.\d+\.\d+\.\d+|\[::1\])$/.test(u.hostname);

/** What any operation takes, before the contract narrows it. */
type AnyInput = CallOptions & Partial<Record<'path' | 'query', Record<string, unknown>>> & {
  body?: unknown; ifMatch?: string; ifNoneMatch?: string; idempotencyKey?: string; lastEventId?: number;
};

/** Makes calls out of the table of operations. */
class Caller {
  #transport: Transport;
  #table: Table;

  constructor(transport: Transport, table: Table) {
    this.#transport = transport;
    this.#table = table;
  }

  methods(): object {
    return Object.fromEntries(Object.keys(this.#table).map(id => [id, async (input?: AnyInput) => (await this.call(id, input)).body]));
  }

  calls(): object {
    return {call: this.call.bind(this), paginate: this.paginate.bind(this)};
  }

  async call(id: string, input: AnyInput = {}, address?: URL): Promise<Answer<unknown>> {
    const operation = this.#table[id];
    if (!operation) throw invalid('making the request: there is no such operation');
    const call = callOf(operation, input, address);
    const response = await this.#transport.send(call);
    return {
      status: response.status, headers: response.headers, etag: response.headers.get('ETag') ?? undefined,
      body: await this.#read(operation, call, response),
    };
  }

  async *paginate(id: string, input: AnyInput = {}): AsyncGenerator<unknown, void, undefined> {
    const place = this.#table[id]?.cursor;
    if (!place) throw invalid('making the request: the operation does not answer in pages');
    let given: object = input[place] ?? {};
    for (;;) {
      const {body} = await this.call(id, {...input, [place]: given});
      yield body;
      const cursor = (body as {next_cursor?: string}).next_cursor;
      if (!cursor) return;
      given = {...given, cursor};
    }
  }

  async #read(operation: Operation, call: Call, response: Response): Promise<unknown> {
    if (isStream(operation)) return streamOf(response, call.signal);
    const text = await this.#transport.text(call, response);
    return operation.answer === 'json' && isJSON(response) ? parse(text, response) : text;
  }
}

const isStream = (operation: Operation) => operation.answer === 'bytes' || operation.answer === 'events';

const isJSON = (response: Response) => !response.headers.get('Content-Type')?.startsWith('text/plain');

function callOf(operation: Operation, input: AnyInput, address?: URL): Call {
  const key = input.idempotencyKey ?? (operation.idempotencyKey ? crypto.randomUUID() : undefined);
  const named = {
    'If-Match': input.ifMatch, 'If-None-Match': input.ifNoneMatch, 'Idempotency-Key': key, 'Last-Event-ID': input.lastEventId,
  };
  const headers = Object.entries(named).flatMap(([name, value]) => value === undefined ? [] : [[name, String(value)]]);
  return {
    method: operation.method, path: operation.path, address, ids: input.path, query: address ? undefined : input.query,
    headers: Object.fromEntries(headers), body: input.body, signal: input.signal,
    isRepeatable: operation.repeatable === true || key !== undefined, isAnonymous: operation.public === true,
    isProbe: operation.probe === true, isLasting: isStream(operation),
  };
}

function parse(text: string, response: Response): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new LatticekeepError('reading the answer: it is not JSON', {status: response.status});
  }
}

/** Returns the body of an answer for reading as it arrives. */
function streamOf(response: Response, signal: AbortSignal | undefined): ReadableStream<Uint8Array> {
  const reader = response.body?.getReader();
  return new ReadableStream<Uint8Array>({
    async pull(controller) {
      try {
        const part = await reader?.read();
        if (part?.value) controller.enqueue(part.value);
        else controller.close();
      } catch (error) {
        throw signal?.aborted ? signal.reason : noAnswer('reading the answer: it ended early', error);
      }
    },
    cancel: reason => reader?.cancel(reason),
  }, {highWaterMark: 0});
}

// ---- sessions

function sessionMethods(transport: Transport, session: Session): object {
  return {
    async login(input: AnyInput): Promise<TokenAnswer> {
      const tokens = await tokensOf(transport, callOf(tables.v2.login, input));
      session.begin(tokens);
      return tokens.answer;
    },
    refreshSession: (options: CallOptions = {}) => session.force(options.signal),
    async logout(options: CallOptions = {}): Promise<void> {
      const credential: Credential | undefined = session.credential;
      if (!credential) return;
      // The server accepts either token, so an expired access token needs no renewal first.
      const call = {...callOf(tables.v2.logout, options), credential, refreshToken: session.refresh};
      try {
        await transport.text(call, await transport.send(call));
      } catch (error) {
        if (!(error instanceof LatticekeepError && error.isUnauthenticated)) throw error;
      }
      session.end(credential.session);
    },
  };
}

/** Exchanges the refresh token for new tokens. */
function exchange(transport: Transport, refreshToken: string, now: () => number): Promise<Tokens> {
  const call = callOf(tables.v2.refreshSession, {});
  return tokensOf(transport, {...call, isAnonymous: true, refreshToken, until: now() + renewTimeout});
}

/** Sends a call whose answer contains both tokens. */
async function tokensOf(transport: Transport, call: Call): Promise<Tokens> {
  const response = await transport.send(call);
  const answer = parse(await transport.text(call, response), response) as TokenAnswer;
  const cookie = response.headers.getSetCookie().find(c => c.startsWith(`${refreshCookie}=`));
  return {answer, refresh: cookie?.slice(refreshCookie.length + 1).split(';')[0] ?? ''};
}

// ---- streams

function streamMethods(caller: Caller, plainHTTP: boolean): object {
  return {
    async downloadReport(url: string | URL, options: CallOptions = {}): Promise<unknown> {
      const signed = URL.canParse(String(url)) ? new URL(url) : undefined;
      if (!signed || signed.username || signed.password || !/^https?:$/.test(signed.protocol)) {
        throw invalid('making the request: the URL is not one of a report');
      }
      if (isExposed(signed, plainHTTP)) throw invalid('making the request: plain HTTP to another machine shows it the report: use https, or plainHTTP');
      return (await caller.call('downloadReport', options, signed)).body;
    },
    async *tailAuditLog(input?: AnyInput): AsyncGenerator<AuditEntry, void, undefined> {
      const {body} = await caller.call('tailAuditLog', input);
      for await (const line of linesOf(body as ReadableStream<Uint8Array>)) {
        // Other lines are empty, comments, or an id, which the entry contains too.
        if (line.startsWith('data: ')) yield JSON.parse(line.slice('data: '.length)) as AuditEntry;
      }
    },
  };
}

// maxLine is the length of the longest line of a tail.
const maxLine = 1 << 20;

/** Reads the lines of a stream, without one that is cut short. */
async function* linesOf(stream: ReadableStream<Uint8Array>): AsyncGenerator<string, void, undefined> {
  const reader = stream.getReader(), decoder = new TextDecoder();
  try {
    let rest = '';
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + decoder.decode(part.value, {stream: true})).split('\n');
      rest = lines.pop() ?? '';
      if (rest.length > maxLine) throw new LatticekeepError('reading the tail: a line is longer than any entry');
      yield* lines;
    }
  } finally {
    await reader.cancel();
  }
}
