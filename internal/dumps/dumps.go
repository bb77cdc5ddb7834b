// Package dumps keeps the memory of this process, which holds keys and plaintext, out of core dumps and
// from other processes.
package dumps
