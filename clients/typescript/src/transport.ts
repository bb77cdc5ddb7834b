// Sends calls to one deployment, with the rules for credentials and repetition. A call keeps its principal to the end,
// even if a user signs in or out meanwhile.
import {LatticekeepError, errorOf, invalid, noAnswer, retryAfter} from './error.js';
import type {Credential} from './session.js';

/** The parts of the platform that a test replaces. */
export interface Platform {
  fetch: typeof fetch;
  /** Returns milliseconds since 1970. */
  now: () => number;
  /** Resolves after some milliseconds, or rejects with the reason of the signal. */
  sleep: (milliseconds: number, signal?: AbortSignal) => Promise<void>;
}

/** One request, with what its operation says about sending it. */
export interface Call {
  readonly method: string;
  /** The path with parameter names in braces, as in the contract. */
  readonly path: string;
  /** A complete URL instead of base, path and parameters. */
  readonly address?: URL | undefined;
  readonly ids?: Readonly<Record<string, unknown>> | undefined;
  readonly query?: Readonly<Record<string, unknown>> | undefined;
  readonly headers?: Readonly<Record<string, string>> | undefined;
  readonly body?: unknown;
  readonly signal?: AbortSignal | undefined;

  /** Repeating the call has no further effect, so it is repeated although its outcome is unknown. */
  readonly isRepeatable?: boolean;
  /** It carries no credential. */
  readonly isAnonymous?: boolean;
  /** It asks about the present moment and is never repeated. */
  readonly isProbe?: boolean;
  /** Its answer may take as long as the signal allows. */
  readonly isLasting?: boolean;
  /** The call carries this credential, and a 401 does not renew the session. */
  readonly credential?: Credential | undefined;
  readonly refreshToken?: string;
  /** No attempt and no pause may last beyond this time, in milliseconds since 1970. */
  readonly until?: number;
}

export interface TransportOptions extends Platform {
  /** The URL to which paths are appended. */
  base: string;
  retries: number;
  /** Bounds one attempt, in milliseconds. */
  timeout: number;
  credential: () => Credential | undefined;
  renew?: (refused: Credential, signal?: AbortSignal) => Promise<Credential>;
}

// If the server sets no pause, the first one is half to all of firstWait, and each later one is twice as long, up to
// lastWait. longestWait bounds the pause that the server may set. All in milliseconds.
const firstWait = 200, lastWait = 10_000, longestWait = 120_000;

/** The name of the cookie that holds the refresh token. */
export const refreshCookie = 'refreshToken';

export class Transport {
  #o: TransportOptions;

  constructor(options: TransportOptions) {
    this.#o = options;
  }

  /** Sends a call, with retries, and returns the answer. It throws for every answer other than a success. */
  async send(call: Call): Promise<Response> {
    const url = call.address?.href ?? this.#o.base + escapedPath(call.path, call.ids) + queryString(call.query);
    const body = call.body === undefined ? undefined : JSON.stringify(call.body);
    let who = call.credential ?? (call.isAnonymous ? undefined : this.#o.credential());
    const {renew} = this.#o;
    const renewable = renew && call.credential === undefined && who?.access !== undefined;
    for (let attempt = 0; ; attempt++) {
      let outcome = await this.#sendOnce(url, body, call, who);
      if (renewable && who && !(outcome instanceof LatticekeepError) && outcome.status === 401) {
        const refused = outcome;
        const renewed = await renew(who, call.signal).catch((error: unknown) => {
          if (error instanceof LatticekeepError && error.isUnauthenticated) return undefined; // the session has ended: the 401 is the answer
          discard(refused);
          throw error;
        });
        if (renewed) {
          discard(refused);
          who = renewed;
          outcome = await this.#sendOnce(url, body, call, who);
        }
      }
      const wait = this.#decide(call, attempt, outcome);
      if (wait === undefined || call.until !== undefined && this.#o.now() + wait >= call.until) return this.#finish(call, outcome);
      if (!(outcome instanceof LatticekeepError)) discard(outcome);
      await this.#o.sleep(wait, call.signal);
    }
  }

  /** Reads the rest of an answer as text. */
  async text(call: Call, response: Response): Promise<string> {
    try {
      return await response.text();
    } catch (error) {
      call.signal?.throwIfAborted();
      throw noAnswer('reading the answer: it ended early', error);
    }
  }

  async #finish(call: Call, outcome: Response | LatticekeepError): Promise<Response> {
    if (outcome instanceof LatticekeepError) throw outcome;
    if (outcome.ok) return outcome;
    throw errorOf(outcome, await this.text(call, outcome), this.#o.now());
  }

  async #sendOnce(url: string, body: string | undefined, call: Call, who: Credential | undefined): Promise<Response | LatticekeepError> {
    const headers = headersOf(call, who);
    if (body !== undefined) headers.set('Content-Type', 'application/json');
    const {fetch, now, timeout: limit} = this.#o;
    const time = Math.max(0, call.until === undefined ? limit : Math.min(limit, call.until - now()));
    const timeout = call.isLasting ? undefined : AbortSignal.timeout(time);
    const signals = [call.signal, timeout].filter(s => s !== undefined);
    call.signal?.throwIfAborted();
    try {
      // The interface has no redirects, and one would take X-API-Key to another host.
      return await fetch(url, {
        method: call.method, headers, redirect: 'manual', credentials: 'omit',
        ...(body === undefined ? {} : {body}), ...(signals.length === 0 ? {} : {signal: AbortSignal.any(signals)}),
      });
    } catch (error) {
      call.signal?.throwIfAborted();
      if (timeout?.aborted) throw noAnswer(`calling the server: no answer came within ${time / 1000} s`);
      return noAnswer('calling the server: no answer came', error);
    }
  }

  /**
   * Returns the pause before the call is sent again, or undefined when it is not. The server answers 429 before it does
   * anything. After a 503 or a broken connection the outcome is unknown.
   */
  #decide(call: Call, attempt: number, outcome: Response | LatticekeepError): number | undefined {
    if (call.isProbe || attempt >= this.#o.retries) return undefined;
    if (outcome instanceof LatticekeepError) return call.isRepeatable ? backoff(attempt) : undefined;
    const isSafe = outcome.status === 429 || outcome.status === 503 && call.isRepeatable;
    const wait = retryAfter(outcome, this.#o.now()) * 1000;
    if (!isSafe || wait > longestWait) return undefined;
    return wait > 0 ? wait + Math.random() * firstWait : backoff(attempt); // so that many clients do not return at the same instant
  }
}

function backoff(attempt: number): number {
  const full = Math.min(lastWait, firstWait * 2 ** attempt);
  return full / 2 + Math.random() * full / 2;
}

/** Sleeps with the timers of the platform. */
export function sleep(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const end = () => {
      signal?.removeEventListener('abort', abort);
      resolve();
    };
    const timer = setTimeout(end, milliseconds);
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    signal?.addEventListener('abort', abort, {once: true});
  });
}

/** Reads the rest of a short answer, so that its connection can be used again. */
function discard(response: Response): void {
  response.arrayBuffer().catch(() => {});
}

/**
 * Returns the path with its ids. A segment "." or ".." is refused: URLs have none, not even an escaped one (URL Standard
 * §4.4), so the call would reach another operation, and no id or name is one.
 */
function escapedPath(path: string, ids: Call['ids']): string {
  return path.replace(/\{(\w+)\}/g, (_, name: string) => {
    const id = String(ids?.[name] ?? '');
    if (id === '') throw invalid(`making the request: ${name} is empty`);
    if (id === '.' || id === '..' || !id.isWellFormed()) throw invalid(`making the request: ${name} cannot be an id or a name`);
    return encodeURIComponent(id);
  });
}

function headersOf(call: Call, who: Credential | undefined): Headers {
  try {
    const headers = new Headers({'User-Agent': 'latticekeep-typescript', ...call.headers});
    if (who) headers.set(who.header, who.value);
    if (call.refreshToken) headers.set('Cookie', `${refreshCookie}=${call.refreshToken}`);
    return headers;
  } catch {
    // The platform's own error repeats the value, which may be the API key.
    throw invalid('making the request: the API key or another header has a character that HTTP does not allow');
  }
}

function queryString(query: Call['query']): string {
  const given = Object.entries(query ?? {}).filter(([, v]) => v !== undefined && v !== null);
  return given.length === 0 ? '' : `?${new URLSearchParams(given.map(([k, v]): [string, string] => [k, String(v)]))}`;
}
