// The types of calls, computed from the contracts: nothing here exists at run time.

/** One line of the generated table of operations. */
export interface Operation {
  readonly method: string;
  readonly path: string;
  readonly answer: 'json' | 'text' | 'bytes' | 'events';
  readonly public?: boolean;
  readonly repeatable?: boolean;
  readonly probe?: boolean;
  readonly idempotencyKey?: boolean;
  readonly cursor?: 'query' | 'body';
}

export type Table = Readonly<Record<string, Operation>>;

/** What every call takes besides what its operation takes. */
export interface CallOptions {
  /** Ends the call, its pauses included. */
  signal?: AbortSignal | undefined;
}

/** The headers that operations take, and what they are called here. */
interface HeaderNames {
  'If-Match': 'ifMatch';
  'If-None-Match': 'ifNoneMatch';
  'Idempotency-Key': 'idempotencyKey';
  'Last-Event-ID': 'lastEventId';
}

/** An operation as openapi-typescript writes it. */
interface Described {
  parameters: {query?: unknown; path?: unknown; header?: unknown};
  requestBody?: unknown;
  responses: object;
}

type JSONOf<Body> = Body extends {content: {'application/json': infer B}} ? B : never;

type BodyInput<O extends Described> =
  [NonNullable<O['requestBody']>] extends [never] ? {body?: undefined}
    : undefined extends O['requestBody'] ? {body?: JSONOf<NonNullable<O['requestBody']>>}
      : {body: JSONOf<O['requestBody']>};

type HeaderInput<H> = [NonNullable<H>] extends [never] ? {}
  : {[Name in keyof NonNullable<H> & keyof HeaderNames as HeaderNames[Name]]?: NonNullable<H>[Name] | undefined};

/** What a call of an operation takes: `path`, `query` and `body` as the contract has them, and its headers. */
export type Input<O> = O extends Described
  ? Pick<O['parameters'], 'query' | 'path'> & BodyInput<O> & HeaderInput<O['parameters']['header']> & CallOptions : never;

/** The arguments of a method. The input can be left out when nothing in it is required. */
export type Arguments<O> = {} extends Input<O> ? [input?: Input<O>] : [input: Input<O>];

type Content<R> = R extends {content: infer C} ? C[keyof C] : never;
type Successful<R> = Content<R[keyof R & (200 | 201)]>;

/** What a call of an operation resolves to. */
export type BodyOf<O, Row> = O extends {responses: infer R}
  ? Row extends {answer: 'json'} ? Successful<R> : Row extends {answer: 'text'} ? string : ReadableStream<Uint8Array> : never;

/** A method for each operation of a contract. */
export type Methods<Operations, Rows> = {
  [Id in keyof Operations & keyof Rows]: (...input: Arguments<Operations[Id]>) => Promise<BodyOf<Operations[Id], Rows[Id]>>;
};

/** The operations that answer in pages. */
export type Paged<Rows> = {[Id in keyof Rows]: Rows[Id] extends {cursor: string} ? Id : never}[keyof Rows];
