// The scores of all frameworks.
import {useEffect, useState} from '../vendor/preact.js';
import {get} from './api.js';
import {frameworks} from './words.js';

// Without these nothing else would come either.
const final = new Set([0, 401, 403, 429]);

// useScores fetches one score after the other, since each is work for the server, and
// gives {results, stopped, again}. results has {score}, or {error} for one that failed
// and hides no other; stopped is the error after which no other was asked for. again
// fetches what is missing.
export function useScores(wanted = true) {
  const [results, setResults] = useState({});
  const [stopped, setStopped] = useState(null);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (!wanted) return;
    const abort = new AbortController();
    setStopped(null);
    (async () => {
      for (const framework of Object.keys(frameworks)) {
        if (results[framework]?.score) continue;
        try {
          const score = await get('/api/v2/compliance/score', {framework}, abort.signal);
          setResults(all => ({...all, [framework]: {score}}));
        } catch (error) {
          if (abort.signal.aborted) return;
          if (final.has(error.status)) return setStopped(error);
          setResults(all => ({...all, [framework]: {error}}));
        }
      }
    })();
    return () => abort.abort();
  }, [turn, wanted]);
  return {results, stopped, again: () => setTurn(n => n + 1)};
}
