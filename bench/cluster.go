package bench

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

const (
	clusterSlots = 16384
	formTimeout  = 30 * time.Second
)

// startServers starts private redis-servers: one, or a cluster of masters without replicas if
// masters is above 1. It sets the URL under which the roles reach them.
func (f *fleet) startServers(ctx context.Context, masters int, aof bool) error {
	var addrs []string
	for range masters {
		s, err := redisproc.Start(ctx, redisproc.Options{AOF: aof, Cluster: masters > 1})
		if err != nil {
			return err
		}
		f.servers, addrs = append(f.servers, s), append(addrs, s.Addr())
	}
	f.url = "redis://" + strings.Join(addrs, ",")
	if masters == 1 {
		f.url = f.servers[0].URL()
		return nil
	}
	if err := f.formCluster(ctx, addrs); err != nil {
		return fmt.Errorf("form a cluster: %w", err)
	}
	return nil
}

// formCluster divides the hash slots evenly among the nodes at addrs, connects the nodes to each
// other, and waits until each of them reports that the cluster is complete.
func (f *fleet) formCluster(ctx context.Context, addrs []string) error {
	ctx, cancel := context.WithTimeout(ctx, formTimeout)
	defer cancel()
	var nodes []*redis.Client
	for i, addr := range addrs {
		c := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
		defer c.Close() //nolint:errcheck // nothing can be lost
		nodes = append(nodes, c)
		from, to := clusterSlots*i/len(addrs), clusterSlots*(i+1)/len(addrs)-1
		if err := c.ClusterAddSlotsRange(ctx, from, to).Err(); err != nil {
			return err
		}
		if err := c.Do(ctx, "cluster", "set-config-epoch", i+1).Err(); err != nil {
			return err
		}
	}
	host, port, err := net.SplitHostPort(addrs[0])
	if err != nil {
		return err
	}
	bus, err := nodes[0].ConfigGet(ctx, "cluster-port").Result()
	if err != nil {
		return err
	}
	for _, c := range nodes[1:] {
		if err := c.Do(ctx, "cluster", "meet", host, port, bus["cluster-port"]).Err(); err != nil {
			return err
		}
	}
	return f.await(ctx, "masters", pollInterval, func() (left int, err error) {
		for _, c := range nodes {
			info, err := c.ClusterInfo(ctx).Result()
			if err != nil {
				return 0, err
			}
			if !strings.Contains(info, "cluster_state:ok\r\n") ||
				!strings.Contains(info, "cluster_known_nodes:"+strconv.Itoa(len(nodes))+"\r\n") {
				left++
			}
		}
		return left, nil
	})
}
