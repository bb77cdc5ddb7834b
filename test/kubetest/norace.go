//go:build !race

package kubetest

const underRace = false
