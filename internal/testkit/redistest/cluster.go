package redistest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

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

// Clustered is a Redis Cluster whose masters have one replica each. A dead master is replaced
// within a few seconds. Until then the cluster serves no slot, which is Redis's default.
type Clustered struct {
	t   testing.TB
	URL string

	Masters  []*Redis // at the start
	Replicas []*Redis // at the start; Replicas[i] replicates Masters[i]
}

// ClusterWithReplicas starts a cluster with this number of masters, among which the hash slots are
// divided evenly, and the same number of replicas. It waits until a failover would succeed without
// loss. The options apply to all servers.
func ClusterWithReplicas(t testing.TB, masters int, opts ...Option) *Clustered {
	t.Helper()
	o := redisproc.Options{Args: []string{
		// on a busy machine a live node may be silent for a second
		"--cluster-node-timeout", "2500", "--cluster-allow-replica-migration", "no",
		// With factor 0, a replica never counts as too out of date for a failover, even on a busy
		// machine.
		"--cluster-replica-validity-factor", "0",
		"--repl-diskless-sync-delay", "0",
	}}
	for _, opt := range opts {
		opt(&o)
	}
	nodes := startNodes(t, 2*masters, o)
	form(t, nodes, masters)
	c := &Clustered{t: t, URL: clusterURL(nodes), Masters: nodes[:masters:masters], Replicas: nodes[masters:]}
	for i, replica := range c.Replicas {
		do(t, replica.admin, "cluster", "replicate", c.id(c.Masters[i]))
	}
	c.AwaitWhole()
	return c
}

func (c *Clustered) nodes() []*Redis { return append(slices.Clone(c.Masters), c.Replicas...) }

func (c *Clustered) running() []*Redis {
	return slices.DeleteFunc(c.nodes(), func(r *Redis) bool { return !r.server.Running() })
}

func (c *Clustered) id(node *Redis) string {
	c.t.Helper()
	id, err := node.admin.ClusterMyID(context.WithoutCancel(c.t.Context())).Result()
	if err != nil {
		c.t.Fatalf("ask %s for its id: %v", node.Addr(), err)
	}
	return id
}

// SlotOf returns the hash slot of a key.
func (c *Clustered) SlotOf(key string) int {
	c.t.Helper()
	slot, err := c.running()[0].admin.ClusterKeySlot(context.WithoutCancel(c.t.Context()), key).Result()
	if err != nil {
		c.t.Fatalf("ask for the slot of %q: %v", key, err)
	}
	return int(slot)
}

// owners returns the address of each slot's master, as one serving node sees it.
func (r *Redis) owners(ctx context.Context) (map[int]string, error) {
	if err := r.clusterOK(ctx); err != nil {
		return nil, err
	}
	// CLUSTER SLOTS is used because CLUSTER SHARDS may still name a master that was replaced.
	spans, err := r.admin.ClusterSlots(ctx).Result() //nolint:staticcheck // deprecated, see above
	if err != nil {
		return nil, err
	}
	owners := map[int]string{}
	for _, span := range spans {
		for slot := span.Start; slot <= span.End; slot++ {
			owners[slot] = span.Nodes[0].Addr // the master; its replicas follow
		}
	}
	return owners, nil
}

// agreed returns the master of each slot. It returns an error unless all running nodes name the
// same masters and these run.
func (c *Clustered) agreed(ctx context.Context) (map[int]string, error) {
	var first map[int]string
	for _, node := range c.running() {
		owners, err := node.owners(ctx)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", node.Addr(), err)
		}
		if first == nil {
			first = owners
		}
		if !maps.Equal(first, owners) {
			return nil, fmt.Errorf("%s sees the slots elsewhere than others", node.Addr())
		}
	}
	alive := map[string]bool{}
	for _, node := range c.running() {
		alive[node.Addr()] = true
	}
	for slot, addr := range first {
		if !alive[addr] {
			return nil, fmt.Errorf("slot %d is of %s, which is gone", slot, addr)
		}
	}
	return first, nil
}

// MasterOf waits until the running nodes agree on the master of a slot, and returns it.
func (c *Clustered) MasterOf(slot int) *Redis {
	c.t.Helper()
	var found *Redis
	await(c.t, fmt.Sprintf("master of slot %d", slot), func(ctx context.Context) error {
		owners, err := c.agreed(ctx)
		if err != nil {
			return err
		}
		at := slices.IndexFunc(c.nodes(), func(r *Redis) bool { return r.Addr() == owners[slot] })
		if at < 0 {
			return errors.New("nobody has it")
		}
		found = c.nodes()[at]
		return nil
	})
	return found
}

// AwaitFailover waits until the running nodes agree on a running master for each slot: after a
// Kill, until the replica has taken over.
func (c *Clustered) AwaitFailover() {
	c.t.Helper()
	await(c.t, "failover", func(ctx context.Context) error {
		_, err := c.agreed(ctx)
		return err
	})
}

// AwaitWhole waits until all nodes run and agree, and each master has a replica with all of its
// data: another failover would lose nothing. Before this call, restart a killed node, but only
// after AwaitFailover; otherwise it would come back as an empty master.
func (c *Clustered) AwaitWhole() {
	c.t.Helper()
	await(c.t, "replicas", func(ctx context.Context) error {
		owners, err := c.agreed(ctx)
		if err != nil {
			return err
		}
		masters := map[string]bool{}
		for _, addr := range owners {
			masters[addr] = true
		}
		for _, node := range c.nodes() {
			want := "master_link_status:up"
			if masters[node.Addr()] {
				want = "state=online"
			}
			if err := lacks(node.admin.Info(ctx, "replication"), want); err != nil {
				return fmt.Errorf("%s: %w", node.Addr(), err)
			}
		}
		return c.sameEpochs(ctx)
	})
}

// sameEpochs returns an error unless all nodes know the same config epochs of the masters, and no
// two masters have the same. A master refuses its vote to a replica whose config epoch for the
// failed master is out of date, and the replica can't learn a newer one after that failure.
func (c *Clustered) sameEpochs(ctx context.Context) error {
	var first map[string]string // master by epoch
	for _, node := range c.nodes() {
		text, err := node.admin.ClusterNodes(ctx).Result()
		if err != nil {
			return fmt.Errorf("%s: %w", node.Addr(), err)
		}
		masters := map[string]string{}
		for line := range strings.Lines(text) {
			// A line of CLUSTER NODES: id address flags master ping-sent pong-received config-epoch
			// link-state slots...
			fields := strings.Fields(line)
			if len(fields) < 8 || !strings.Contains(fields[2], "master") {
				continue
			}
			id, epoch := fields[0], fields[6]
			if other := masters[epoch]; other != "" {
				return fmt.Errorf("%s: masters %s and %s have the same config epoch %s", node.Addr(), id, other, epoch)
			}
			masters[epoch] = id
		}
		if first == nil {
			first = masters
		}
		if !maps.Equal(first, masters) {
			return fmt.Errorf("%s knows other config epochs than others: %v, not %v", node.Addr(), masters, first)
		}
	}
	return nil
}

// MoveSlot moves a hash slot with its keys to another master while clients continue, like
// redis-cli's reshard. Each function of between is called before the first key moves, after
// every few keys, and when all keys have moved but the slot has not; left is the number of keys
// on the old master.
func (c *Clustered) MoveSlot(slot int, to *Redis, between ...func(left int)) {
	c.t.Helper()
	from := c.MasterOf(slot)
	if from == to {
		return
	}
	do(c.t, to.admin, "cluster", "setslot", slot, "importing", c.id(from))
	do(c.t, from.admin, "cluster", "setslot", slot, "migrating", c.id(to))
	for {
		left, err := from.admin.ClusterCountKeysInSlot(c.t.Context(), slot).Result()
		if err != nil {
			c.t.Fatalf("count keys of slot %d: %v", slot, err)
		}
		for _, fn := range between {
			fn(int(left))
		}
		if !c.moveSome(slot, from, to) {
			break
		}
	}
	// Tell the new master first: other nodes redirect clients to it as soon as they know, and it
	// must accept them.
	order := []*Redis{to, from}
	for _, node := range c.running() {
		if node != to && node != from {
			order = append(order, node)
		}
	}
	for _, node := range order {
		err := node.admin.Do(c.t.Context(), "cluster", "setslot", slot, "node", c.id(to)).Err()
		// replicas get the new owner from their master
		if err != nil && !strings.Contains(err.Error(), "only with masters") {
			c.t.Fatalf("give slot %d to %s: %v", slot, to.Addr(), err)
		}
	}
	await(c.t, fmt.Sprintf("move of slot %d", slot), func(ctx context.Context) error {
		owners, err := c.agreed(ctx)
		if err == nil && owners[slot] != to.Addr() {
			err = fmt.Errorf("it is of %s", owners[slot])
		}
		return err
	})
}

// moveSome moves up to ten keys of a slot, and reports whether there were any.
func (c *Clustered) moveSome(slot int, from, to *Redis) bool {
	c.t.Helper()
	keys, err := from.admin.ClusterGetKeysInSlot(c.t.Context(), slot, 10).Result()
	if err != nil {
		c.t.Fatalf("list keys of slot %d: %v", slot, err)
	}
	if len(keys) == 0 {
		return false
	}
	host, port, _ := strings.Cut(to.Addr(), ":")
	args := []any{"migrate", host, port, "", 0, 5000, "keys"}
	for _, key := range keys {
		args = append(args, key)
	}
	// NOKEY: the keys have been deleted meanwhile
	if err := from.admin.Do(c.t.Context(), args...).Err(); err != nil && !errors.Is(err, redis.Nil) {
		c.t.Fatalf("move keys of slot %d: %v", slot, err)
	}
	return true
}
