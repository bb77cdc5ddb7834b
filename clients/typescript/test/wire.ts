// A network in memory, so that no test waits: pauses are noted and take no time.
import {after} from 'node:test';
import {Client, type Options} from '@latticekeep/client';

export interface Sent {
  method: string;
  url: URL;
  headers: Headers;
  body: string;
}

/** The n-th answer, n counting from 1. It may throw, as a network does. */
export type Answers = (request: Sent, n: number) => Response | Promise<Response>;

export class Wire {
  readonly sent: Sent[] = [];
  readonly pauses: number[] = [];
  now = Date.UTC(2026, 10, 21, 10);
  readonly #answer: Answers;

  constructor(answer: Answers) {
    this.#answer = answer;
  }

  client(options: Options = {}): Client {
    return new Client('https://vault.example.org/', {
      apiKey: 'lk_live_test', now: () => this.now,
      fetch: async (input, init) => {
        const signal = init?.signal;
        signal?.throwIfAborted();
        const request = {
          method: init?.method ?? 'GET', url: new URL(String(input)), headers: new Headers(init?.headers), body: String(init?.body ?? ''),
        };
        this.sent.push(request);
        const aborted = new Promise<never>((_, reject) => signal?.addEventListener('abort', () => reject(signal.reason)));
        const answer = await Promise.race([this.#answer(request, this.sent.length), aborted]);
        signal?.throwIfAborted();
        return answer;
      },
      sleep: async (milliseconds, signal) => {
        signal?.throwIfAborted();
        this.pauses.push(milliseconds);
        this.now += milliseconds;
      },
      ...options,
    });
  }
}

/** An answer that does not come. As a real connection does, it keeps the process. */
export const silent = () => new Promise<Response>(() => { intervals.push(setInterval(() => {}, 1000)); });

const intervals: NodeJS.Timeout[] = [];
after(() => intervals.forEach(clearInterval));

export const success = (fields: object = {}, headers: Record<string, string> = {}) => Response.json({success: true, ...fields}, {headers});

/** An error as version 2 answers it. */
export const refusal = (status: number, headers: Record<string, string> = {}) => Response.json(
  {success: false, error: {code: status, message: 'the reason', request_id: 'req_1', timestamp: '2026-11-21T10:00:00Z'}}, {status, headers});

/** What fetch throws when a connection breaks. */
export const broken = () => new TypeError('fetch failed', {cause: new Error('connection reset')});
