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
	for range masters {
		nodes = append(nodes, start(t, redisproc.Options{
			Cluster: true,
			Args:    []string{"--cluster-node-timeout", "2000"},
		}))
	}
	for i, node := range nodes {
		c := node.Client()
		do(t, c, "cluster", "addslotsrange", slots*i/masters, slots*(i+1)/masters-1)
		do(t, c, "cluster", "set-config-epoch", i+1)
		if i > 0 {
			host, port, _ := strings.Cut(nodes[0].Addr(), ":")
			do(t, c, "cluster", "meet", host, port, busPort(t, nodes[0]))
		}
	}
	for _, node := range nodes {
		c := node.Client()
		await(t, "redis cluster", func(ctx context.Context) error {
			info, err := c.ClusterInfo(ctx).Result()
			for _, want := range []string{"cluster_state:ok", fmt.Sprintf("cluster_known_nodes:%d", masters)} {
				if !strings.Contains(info, want+"\r\n") {
					return fmt.Errorf("%s lacks %s: %w\n%s", node.Addr(), want, err, info)
				}
			}
			return nil
		})
	}
	return "redis://" + strings.Join(addrs(nodes), ","), nodes
}

// busPort is where the nodes of a cluster talk to one another.
func busPort(t testing.TB, node *Redis) int {
	t.Helper()
	got, err := node.Client().ConfigGet(t.Context(), "cluster-port").Result()
	if err != nil {
		t.Fatalf("get cluster port: %v", err)
	}
	port, err := strconv.Atoi(got["cluster-port"])
	if err != nil {
		t.Fatalf("get cluster port: %v", err)
	}
	return port
}

func addrs(nodes []*Redis) []string {
	var all []string
	for _, node := range nodes {
		all = append(all, node.Addr())
	}
	return all
}
