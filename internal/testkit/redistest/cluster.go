package redistest

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/bulkaction/bulkaction/internal/redisproc"
)

const slots = 16384

// Cluster starts a Redis Cluster of so many masters, without replicas. The slots are spread
// evenly, in the order of the nodes. The URL names all of them.
func Cluster(t testing.TB, masters int) (url string, nodes []*Redis) {
	t.Helper()
	nodes = startNodes(t, masters, redisproc.Options{Args: []string{"--cluster-node-timeout", "2000"}})
	form(t, nodes, masters)
	for _, node := range nodes {
		await(t, "redis cluster", node.clusterOK)
	}
	return clusterURL(nodes), nodes
}

func clusterURL(nodes []*Redis) string {
	var addrs []string
	for _, node := range nodes {
		addrs = append(addrs, node.Addr())
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

// form has the nodes meet, and the first of them share the slots; it waits until each knows all.
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

// clusterOK returns nil when the node serves its slots and has seen a master for each.
func (r *Redis) clusterOK(ctx context.Context) error {
	return lacks(r.admin.ClusterInfo(ctx), "cluster_state:ok\r\n")
}

// busPort is where the nodes of a cluster talk to one another.
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
