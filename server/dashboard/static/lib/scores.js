// The scores of all frameworks, which come in one request and leave one entry in the log.
import {get} from './api.js';
import {useLoad} from './ui.js';

// useScores gives {results, stopped, again, all}: results has {score} by framework, stopped is the error of the
// request or null, again asks once more, and all is the whole answer when it is there.
export function useScores(wanted = true) {
  const load = useLoad(signal => wanted ? get('/api/v2/compliance/scores', undefined, signal) : new Promise(() => {}), [wanted]);
  const {scores = [], proof, head} = load.data ?? {};
  return {
    results: Object.fromEntries(scores.map(s => [s.framework, {score: {...s, proof, head}}])),
    stopped: load.error ?? null, again: load.reload, all: load.data,
  };
}
