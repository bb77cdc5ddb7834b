package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/latticekeep/latticekeep/controllers"
)

// gatherOperator returns the metrics of the operator's libraries: of its queues,
// its reconciles and its requests to the API server. Those of the process are
// there already.
func gatherOperator() ([]*dto.MetricFamily, error) {
	families, err := metrics.Registry.Gather()
	return slices.DeleteFunc(families, func(f *dto.MetricFamily) bool {
		return strings.HasPrefix(f.GetName(), "go_") || strings.HasPrefix(f.GetName(), "process_")
	}), err
}

// connect finds the cluster to be the operator of, if there is one.
func (s *service) connect(kubeconfig string) (err error) {
	if s.cluster, err = ClusterConfig(kubeconfig); err != nil || s.cluster == nil {
		return err
	}
	controllers.LogLibrariesTo(s.logger.Handler())
	s.operator.Metrics, s.operator.View = controllers.NewMetrics(), new(controllers.View)
	return nil
}

// sealingKeyUse is what the operator knows of the use of sealing keys.
func (s *service) sealingKeyUse() sealingKeyUse {
	if s.cluster == nil {
		return nil
	}
	return s.operator.Metrics.SealingKeyUse
}

// The operator is run again after operatorFirstRetry, then twice as long each
// time, up to operatorLastRetry.
const operatorFirstRetry, operatorLastRetry = time.Second, time.Minute

// runOperator runs the operator again and again until ctx ends. What ends it early
// is trouble with the cluster, which is no reason to end the HTTP service that
// workloads read from: it is logged, with the remedy that the error names.
func runOperator(ctx context.Context, logger *slog.Logger, run func() error) error {
	wait := operatorFirstRetry
	for {
		began := time.Now()
		err := run()
		if ctx.Err() != nil {
			return err
		}
		if time.Since(began) > operatorLastRetry { // this is new trouble
			wait = operatorFirstRetry
		}
		logger.Error("operator stopped; retrying", "in", wait, "err", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		wait = min(2*wait, operatorLastRetry)
	}
}

// ClusterConfig returns the cluster to be the operator of, and nil for none.
func ClusterConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("reading the kubeconfig: %w", err)
		}
		return cfg, nil
	}
	cfg, err := rest.InClusterConfig()
	// A pod without a ServiceAccount token is meant to have nothing to do with its cluster.
	if errors.Is(err, rest.ErrNotInCluster) || errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("reading the pod's cluster configuration: %w", err)
	}
	return cfg, nil
}
