package redistest

import "github.com/redis/go-redis/v9"

// NoHook is a hook of a Redis client that changes nothing. A hook of a test embeds it and has only
// the methods that it needs.
type NoHook struct{}

// DialHook returns next.
func (NoHook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook returns next.
func (NoHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

// ProcessPipelineHook returns next.
func (NoHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
