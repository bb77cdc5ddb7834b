package kmsplugin

import (
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/nodelog"
)

// LogSummary is what the log of a node has, and whose it is. Whether the key set is the right one, the
// reader must know: its id is the fingerprint of the key that signs it.
type LogSummary struct {
	KeySet   string `json:"key_set"` // id
	NodeName string `json:"node_name"`
	nodelog.Summary
}

// ReadNode returns the key set in dir, and this node, which the key set names. It does not need the KMS.
func ReadNode(dir string) (*KeySet, Node, error) {
	s, _, err := readKeySet(dir)
	if err != nil {
		return nil, Node{}, err
	}
	i, err := readIdentity(dir, s)
	return s, i.Node, err
}

// VerifyLog verifies the log of this node in dir.
func VerifyLog(dir string) (LogSummary, error) {
	s, n, err := ReadNode(dir)
	if err != nil {
		return LogSummary{}, err
	}
	key, err := dualsig.ParsePublicKey(n.PublicKey)
	if err != nil {
		return LogSummary{}, err
	}
	sum, err := nodelog.VerifyFolder(dir, key)
	if err == nil && sum.Count() == 0 {
		err = fmt.Errorf("the log of node %s has no entry in %s: see that its plugin has served", n.Name, nodelog.Folder(dir, key.ID()))
	}
	return LogSummary{s.ID, n.Name, sum}, err
}

// VerifyLogFiles verifies files of a node's log, in the order of their entries. The key set is the content
// of the key set file, which names the node.
func VerifyLogFiles(keySet []byte, paths []string) (LogSummary, error) {
	s, err := ParseKeySet(keySet)
	if err != nil {
		return LogSummary{}, err
	}
	if len(paths) == 0 {
		return LogSummary{}, errors.New("no file of a log was given")
	}
	id, err := nodelog.NodeOf(paths[0])
	if err != nil {
		return LogSummary{}, err
	}
	for _, n := range s.Nodes {
		key, err := dualsig.ParsePublicKey(n.PublicKey)
		if err != nil {
			return LogSummary{}, err
		}
		if key.ID() == id {
			sum, err := nodelog.Verify(key, paths)
			return LogSummary{s.ID, n.Name, sum}, err
		}
	}
	return LogSummary{}, fmt.Errorf("%s is of the node key %s, which the key set does not name: give a key set that does, such as an earlier one", paths[0], id)
}
