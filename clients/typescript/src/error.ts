// What a call failed for. It says nothing of the request: a path may hold the name of a credential.

/** The parts of an error besides its message. What is left out is 0 or empty. */
export interface ErrorParts {
  status?: number;
  code?: number;
  details?: string;
  requestId?: string;
  retryAfter?: number;
  noAnswer?: boolean;
  cause?: unknown;
}

/**
 * A refusal or a failure. `message` is the server's own, which never repeats what was sent. The getters say which
 * reaction an error needs; of most errors one is true.
 */
export class LatticekeepError extends Error {
  override readonly name = 'LatticekeepError';
  /** The HTTP status. 0 without an answer; for a call that was not sent it is that of a server which refuses it. */
  readonly status: number;
  /** The status in the body. It differs from `status` only when a proxy answered. */
  readonly code: number;
  /** More about the failure. Version 1 only. */
  readonly details: string;
  /** Quote it when asking for help; the audit entry contains it. */
  readonly requestId: string;
  /** The pause in seconds that the server asked for; 0 for none. */
  readonly retryAfter: number;
  /** The server could not be reached, or its answer ended early. The outcome of the call is unknown. */
  readonly isNoAnswer: boolean;

  constructor(message: string, parts: ErrorParts = {}) {
    super(message, 'cause' in parts ? {cause: parts.cause} : undefined);
    this.status = parts.status ?? 0;
    this.code = parts.code ?? 0;
    this.details = parts.details ?? '';
    this.requestId = parts.requestId ?? '';
    this.retryAfter = parts.retryAfter ?? 0;
    this.isNoAnswer = parts.noAnswer ?? false;
  }

  /** What `ifNoneMatch` names is still there. */
  get isNotModified(): boolean { return this.status === 304; }
  /** Change the request. */
  get isInvalid(): boolean { return [400, 413, 415, 422].includes(this.status); }
  /** Use another key, or sign in again. */
  get isUnauthenticated(): boolean { return this.status === 401; }
  /** The caller needs another scope. In the vault also: there is no such credential. */
  get isForbidden(): boolean { return this.status === 403; }
  get isNotFound(): boolean { return this.status === 404; }
  get isConflict(): boolean { return this.status === 409; }
  /** Read again, and repeat the change on what is there now. */
  get isPreconditionFailed(): boolean { return this.status === 412; }
  /** Nothing was done. Retry after `retryAfter`. */
  get isRateLimited(): boolean { return this.status === 429; }
  /** Retry later. The outcome of the call is unknown. */
  get isUnavailable(): boolean { return this.status === 503; }
}

/** Returns the error for a call that cannot be sent. */
export const invalid = (message: string): LatticekeepError => new LatticekeepError(message, {status: 400});

/** Returns the error for a call that may not go on as another principal. */
export const unauthenticated = (message: string): LatticekeepError => new LatticekeepError(message, {status: 401});

/** Returns the error for an answer that did not arrive. */
export function noAnswer(what: string, error?: unknown): LatticekeepError {
  // fetch wraps the cause, which may repeat the address or bytes of the answer. Its code or name says enough.
  const cause = error instanceof Error && error.cause instanceof Error ? error.cause : undefined;
  const known = cause && new Error('code' in cause && typeof cause.code === 'string' ? cause.code : cause.name);
  return new LatticekeepError(what, {noAnswer: true, ...(known === undefined ? {} : {cause: known})});
}

/** Returns the error of a response. A body that is not ours, such as a proxy's page, is described by its status alone. */
export function errorOf(response: Response, body: string, now: number): LatticekeepError {
  const told = envelope(body);
  const text = (name: string): string => typeof told[name] === 'string' ? told[name] : '';
  return new LatticekeepError(text('message') || response.statusText.toLowerCase() || `status ${response.status}`, {
    status: response.status,
    code: typeof told.code === 'number' ? told.code : 0,
    details: text('details'),
    requestId: text('request_id') || (response.headers.get('X-Request-ID') ?? ''),
    retryAfter: retryAfter(response, now),
  });
}

function envelope(body: string): Record<string, unknown> {
  try {
    return (JSON.parse(body) as {error?: Record<string, unknown>} | null)?.error ?? {};
  } catch {
    return {};
  }
}

/** Reads the Retry-After header in seconds (RFC 9110 §10.2.3); 0 for none. `now` is in milliseconds since 1970. */
export function retryAfter(response: Response, now: number): number {
  const value = response.headers.get('Retry-After') ?? '';
  if (/^\d{1,9}$/.test(value)) return Number(value);
  const at = / GMT$/.test(value) ? Date.parse(value) : NaN;
  return Number.isNaN(at) ? 0 : Math.max(0, (at - now) / 1000);
}
