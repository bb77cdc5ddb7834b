// The session of a user. Its tokens are in memory only.
import type {components} from './generated/v2.js';
import {LatticekeepError, unauthenticated} from './error.js';

type TokenAnswer = components['schemas']['TokenAnswer'];

/** The header that authenticates the caller. */
export interface Credential {
  readonly header: string;
  readonly value: string;
  /** The access token, if it is one, and the number of its session. */
  readonly access?: string;
  readonly session?: number;
}

export interface Tokens {
  readonly answer: TokenAnswer;
  readonly refresh: string;
}

/**
 * Holds the tokens. A refresh token can be used once, and using it twice ends the session: so one exchange serves all
 * calls that wait for it.
 */
export class Session {
  #exchange: (refresh: string) => Promise<Tokens>;
  #number = 0; // changes with each login and logout, not with a renewal
  #access = ''; // empty before login and after logout
  #refresh = ''; // empty also after the session has ended
  #renewal: {refresh: string; done: Promise<TokenAnswer>} | undefined;

  constructor(exchange: (refresh: string) => Promise<Tokens>) {
    this.#exchange = exchange;
  }

  get credential(): Credential | undefined {
    return this.#access === '' ? undefined : bearer(this.#access, this.#number);
  }

  get refresh(): string {
    return this.#refresh;
  }

  /** Starts a session and replaces the previous one. */
  begin({answer, refresh}: Tokens): void {
    this.#number++;
    this.#access = answer.access_token;
    this.#refresh = refresh;
  }

  /** Clears the session with this number, unless another has replaced it. */
  end(number: number | undefined): void {
    if (this.#number !== number) return;
    this.#number++;
    this.#access = this.#refresh = '';
  }

  /**
   * Returns a new credential of the same session for one that was rejected. When the session has ended, or another has
   * replaced it, the call must not go on as another principal. The rejected token stays set, so that no other credential
   * replaces it unasked.
   */
  async renew(refused: Credential, signal?: AbortSignal): Promise<Credential> {
    if (this.#number !== refused.session) throw unauthenticated('the session of this call was replaced');
    if (this.#access !== refused.access) return bearer(this.#access, this.#number); // another call was faster
    const answer = await this.force(signal);
    return bearer(answer.access_token, refused.session);
  }

  /** Exchanges the refresh token although no token was rejected. The exchange may outlive the call that waits for it. */
  force(signal?: AbortSignal): Promise<TokenAnswer> {
    if (this.#refresh === '') return Promise.reject(unauthenticated('there is no session to renew: sign in'));
    if (this.#renewal?.refresh !== this.#refresh) {
      const refresh = this.#refresh;
      const renewal = {refresh, done: this.#run(refresh).finally(() => {
        if (this.#renewal === renewal) this.#renewal = undefined;
      })};
      renewal.done.catch(() => {}); // whoever waits handles it
      this.#renewal = renewal;
    }
    return unlessAborted(this.#renewal.done, signal);
  }

  async #run(refresh: string): Promise<TokenAnswer> {
    try {
      const tokens = await this.#exchange(refresh);
      if (this.#refresh === refresh) { // nobody has signed in or out meanwhile
        this.#access = tokens.answer.access_token;
        this.#refresh = tokens.refresh;
      }
      return tokens.answer;
    } catch (error) {
      const ended = error instanceof LatticekeepError && error.isUnauthenticated;
      if (ended && this.#refresh === refresh) this.#refresh = '';
      throw error;
    }
  }
}

const bearer = (access: string, session: number): Credential => ({header: 'Authorization', value: `Bearer ${access}`, access, session});

/** Settles as a promise does, or rejects when the signal comes first. */
function unlessAborted<T>(promise: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  if (!signal) return promise;
  return new Promise((resolve, reject) => {
    const abort = () => reject(signal.reason);
    if (signal.aborted) return abort();
    signal.addEventListener('abort', abort, {once: true});
    promise.then(resolve, reject).finally(() => signal.removeEventListener('abort', abort));
  });
}
