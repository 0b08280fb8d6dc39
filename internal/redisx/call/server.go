package call

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"
)

// ServerVersion returns the version of Redis that a server reports, such as 7.0.15. It returns ""
// for a server that does not report it, such as an embedded one, and for a user who may not ask. An
// error means that the server did not answer.
func ServerVersion(ctx context.Context, server redis.Cmdable) (string, error) {
	info, err := server.Info(ctx, "server").Result()
	if IsUnavailable(err) {
		return "", err
	}
	_, rest, found := strings.Cut(info, "redis_version:")
	if !found {
		return "", nil
	}
	version, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(version), nil
}

// EvictionPolicy returns what a server does when its memory is full, e.g. noeviction. It returns ""
// for a server that does not report it, such as an embedded one, and for a user who may not ask.
// An error means that the server did not answer.
func EvictionPolicy(ctx context.Context, server redis.Cmdable) (string, error) {
	info, err := server.Info(ctx, "memory").Result()
	if IsUnavailable(err) {
		return "", err
	}
	_, rest, _ := strings.Cut(info, "maxmemory_policy:")
	policy, _, _ := strings.Cut(rest, "\r\n")
	return policy, nil
}
