package call

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"
)

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
