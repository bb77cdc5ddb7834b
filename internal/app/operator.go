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
	"github.com/latticekeep/latticekeep/internal/sealingkey"
)

// gatherOperator returns the metrics of the operator's libraries: queues, reconciles and requests
// to the API server. It leaves out the process metrics, which the server already has.
func gatherOperator() ([]*dto.MetricFamily, error) {
	families, err := metrics.Registry.Gather()
	return slices.DeleteFunc(families, func(f *dto.MetricFamily) bool {
		return strings.HasPrefix(f.GetName(), "go_") || strings.HasPrefix(f.GetName(), "process_")
	}), err
}

// connect finds the cluster that the operator manages, if there is one.
func (s *service) connect(kubeconfig string) (err error) {
	if s.cluster, err = ClusterConfig(kubeconfig); err != nil || s.cluster == nil {
		return err
	}
	controllers.LogLibrariesTo(s.logger.Handler())
	s.operator.Metrics, s.operator.View = controllers.NewMetrics(), new(controllers.View)
	return nil
}

// sealingKeyUse returns a function that counts the objects in the cluster by sealing key, and nil
// without a cluster.
func (s *service) sealingKeyUse() sealingKeyUse {
	if s.cluster == nil {
		return nil
	}
	return s.operator.Metrics.SealingKeyUse
}

// acceptedValues returns a function that finds the values accepted for an object of the cluster, and
// nil without a cluster.
func (s *service) acceptedValues() sealingkey.AcceptedValues {
	if s.cluster == nil {
		return nil
	}
	return s.operator.View.AcceptedValues
}

// The operator is restarted after operatorFirstRetry. The wait then doubles up to
// operatorLastRetry.
const operatorFirstRetry, operatorLastRetry = time.Second, time.Minute

// runOperator restarts the operator until ctx ends. The operator ends early only because of trouble
// with the cluster. That must not end the HTTP service, from which workloads read, so it is logged
// with the remedy that the error names.
func runOperator(ctx context.Context, logger *slog.Logger, run func() error) error {
	wait := operatorFirstRetry
	for {
		began := time.Now()
		err := run()
		if ctx.Err() != nil {
			return err
		}
		if time.Since(began) > operatorLastRetry { // a new problem: start with a short wait
			wait = operatorFirstRetry
		}
		logger.Error("operator stopped; retrying", "in", wait, "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		wait = min(2*wait, operatorLastRetry)
	}
}

// ClusterConfig returns the configuration of the cluster that the operator manages, and nil without
// one.
func ClusterConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("reading the kubeconfig: %w", err)
		}
		return cfg, nil
	}
	cfg, err := rest.InClusterConfig()
	// A pod without a ServiceAccount token is deliberately kept away from its cluster.
	if errors.Is(err, rest.ErrNotInCluster) || errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("reading the pod's cluster configuration: %w", err)
	}
	return cfg, nil
}
