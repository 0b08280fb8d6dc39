package redistest

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

const slots = 16384

// Cluster starts a Redis Cluster with this number of masters and without replicas. The hash slots
// are divided evenly, in the order of the nodes. The URL contains all nodes. The options apply to
// all of them.
func Cluster(t testing.TB, masters int, opts ...Option) (url string, nodes []*Redis) {
	t.Helper()
	o := redisproc.Options{Args: []string{"--cluster-node-timeout", "2000"}}
	for _, opt := range opts {
		opt(&o)
	}
	nodes = startNodes(t, masters, o)
	form(t, nodes, masters)
	for _, node := range nodes {
		await(t, "redis cluster", node.clusterOK)
	}
	return clusterURL(nodes), nodes
}

func clusterURL(nodes []*Redis) string {
	var addrs []string
	for _, node := range nodes {
		addrs = append(addrs, node.peerAddr())
	}
	if nodes[0].tls {
		return "rediss://" + strings.Join(addrs, ",")
	}
	return "redis://" + strings.Join(addrs, ",")
}

func startNodes(t testing.TB, n int, o redisproc.Options) []*Redis {
	t.Helper()
	o.Cluster = true
	var nodes []*Redis
	for range n {
		nodes = append(nodes, start(t, o))
	}
	return nodes
}

// form joins the nodes to a cluster and divides the hash slots among the first ones, the masters.
// It waits until each node knows all others.
func form(t testing.TB, nodes []*Redis, masters int) {
	t.Helper()
	for i, node := range nodes {
		c := node.admin
		if i < masters {
			do(t, c, "cluster", "addslotsrange", slots*i/masters, slots*(i+1)/masters-1)
			do(t, c, "cluster", "set-config-epoch", i+1)
		}
		if i > 0 {
			host, port, _ := strings.Cut(nodes[0].Addr(), ":")
			do(t, c, "cluster", "meet", host, port, busPort(t, nodes[0]))
		}
	}
	for _, node := range nodes {
		await(t, "nodes of a redis cluster", func(ctx context.Context) error {
			return lacks(node.admin.ClusterInfo(ctx), fmt.Sprintf("cluster_known_nodes:%d\r\n", len(nodes)))
		})
	}
}

// clusterOK returns nil if the node serves its slots and knows a master for each slot.
func (r *Redis) clusterOK(ctx context.Context) error {
	return lacks(r.admin.ClusterInfo(ctx), "cluster_state:ok\r\n")
}

// busPort returns the port on which a node communicates with other nodes.
func busPort(t testing.TB, node *Redis) int {
	t.Helper()
	got, err := node.admin.ConfigGet(t.Context(), "cluster-port").Result()
	if err != nil {
		t.Fatalf("get cluster port: %v", err)
	}
	port, err := strconv.Atoi(got["cluster-port"])
	if err != nil {
		t.Fatalf("get cluster port: %v", err)
	}
	return port
}
