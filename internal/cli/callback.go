package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

func newCallback(r *Root) *cobra.Command {
	return parentCommand("callback", "Let other services be told when groups end, and see what they were not told",
		newCallbackSet(r), newCallbackShow(r), newCallbackDelete(r), newCallbackSecret(r), newCallbackNewKey(r),
		newCallbackList(r), newCallbackRedeliver(r))
}

func newCallbackSet(r *Root) *cobra.Command {
	var set api.CallbackSettings
	cmd := &cobra.Command{
		Use:   "set TENANT --url URL [--events EVENT,EVENT]",
		Short: "Let a URL be called when groups of a tenant end",
		Long: "Let a URL be called when groups of a tenant end. It replaces the tenant's callback endpoint, and enables one\n" +
			"that is disabled. `bulkaction callback secret` shows the secret by which the receiver checks the signature.",
		Example: "  bulkaction callback set acme --url https://example.com/hook\n" +
			"  bulkaction callback set acme --url https://example.com/hook --events group.failed",
		Args: func(cmd *cobra.Command, args []string) error {
			if set.URL == "" {
				return usagef("callback set needs --url")
			}
			return requireID("tenant")(cmd, args)
		},
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.TenantCallback, error) {
			for i, e := range set.Events {
				set.Events[i] = strings.TrimSpace(e)
			}
			return a.SetCallback(ctx, args[0], set)
		}, endpointRows),
	}
	cmd.Flags().StringVar(&set.URL, "url", "", "where to send them")
	cmd.Flags().StringSliceVar(&set.Events, "events", nil,
		"events to be told of (default "+strings.Join(api.DefaultCallbackEvents, ",")+")")
	return cmd
}

func endpointRows(t table, c api.TenantCallback) {
	t.row("Tenant", c.Tenant)
	t.row("URL", c.URL)
	t.row("Events", strings.Join(c.Events, ", "))
	t.row("Secret version", c.SecretVersion)
	t.row("Pending", thousands(c.Pending))
	if c.FailingSince != nil {
		t.row("Failing since", formatTime(*c.FailingSince))
	}
	if c.DisabledAt != nil {
		t.row("Disabled", formatTime(*c.DisabledAt)+": "+c.DisabledBecause)
	}
}

func newCallbackShow(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "show TENANT",
		Short: "Show the callback endpoint of a tenant: its events, how many callbacks wait, whether it is disabled",
		Args:  requireID("tenant"),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.TenantCallback, error) {
			return a.Callback(ctx, args[0])
		}, endpointRows),
	}
}

func newCallbackDelete(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "delete TENANT",
		Short: "Delete the callback endpoint of a tenant; what is pending for it becomes dead",
		Args:  requireID("tenant"),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.CallbackRemoval, error) {
			return a.DeleteCallback(ctx, args[0])
		}, func(t table, c api.CallbackRemoval) { t.row("Deleted", "the callback endpoint of "+c.Tenant) }),
	}
}

func newCallbackSecret(r *Root) *cobra.Command {
	var rotate bool
	cmd := &cobra.Command{
		Use:   "secret TENANT [--rotate]",
		Short: "Print the secret by which the receiver of a tenant's callbacks checks their signatures",
		Long: "Print the secret by which the receiver of a tenant's callbacks checks their signatures. With --rotate the\n" +
			"tenant gets a new one; for 24 hours its callbacks are signed with both. A second rotation within this time\n" +
			"ends the first secret at once.",
		Args: requireID("tenant"),
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			get := a.CallbackSecret
			if rotate {
				get = a.RotateCallbackSecret
			}
			s, err := get(ctx, args[0])
			if err != nil {
				return err
			}
			if r.JSON {
				return r.Print(s)
			}
			if s.PreviousUntil != nil {
				r.Notef("This is version %d. Until %s callbacks are also signed with the previous secret.",
					s.Version, formatTime(*s.PreviousUntil))
			}
			_, err = fmt.Fprintln(r.Out, s.Secret)
			return err
		}),
	}
	cmd.Flags().BoolVar(&rotate, "rotate", false, "first replace it by a new one")
	return cmd
}

// newCallbackNewKey returns a command that writes a file with a new master key, for hosts without
// openssl. It never replaces a key, which would change the secrets of all tenants.
func newCallbackNewKey(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "new-key FILE",
		Short: "Write a file with a new master key, from which the secrets of all tenants are derived",
		Long: "Write a file with a new master key, for BULKACTION_CALLBACK_MASTER_KEY_FILE of ingest and watcher. Only its\n" +
			"owner may read it. A file that exists is refused: another key would change the secrets of all tenants.",
		Args: requireKeyFile,
		RunE: func(_ *cobra.Command, args []string) error {
			key := make([]byte, 32)
			_, _ = rand.Read(key) // never fails
			f, err := os.OpenFile(args[0], os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("write a master key: %s exists, and stays as it is", args[0])
			}
			if err != nil {
				return fmt.Errorf("write a master key: %w", err)
			}
			_, err = fmt.Fprintln(f, base64.StdEncoding.EncodeToString(key))
			if err := errors.Join(err, f.Close()); err != nil {
				return errors.Join(fmt.Errorf("write a master key: %w", err), os.Remove(args[0]))
			}
			return r.showKeyFile(keyFile{File: args[0], Created: true}, "has a new master key")
		},
	}
}

func newCallbackList(r *Root) *cobra.Command {
	list := listFlags{order: "first"}
	var filter client.CallbackFilter
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List callbacks that are dead, newest first, or with --state pending those that wait, by endpoint",
		Args:    cobra.NoArgs,
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			return printList(r, list, a.Callbacks(ctx, filter), &columns[api.Callback]{
				none:   "No callbacks found.",
				format: "%-40v %-16v %-17v %-8v %5v %-20v %-40v %v",
				head:   []any{"CALLBACK", "TENANT", "EVENT", "STATE", "TRIES", "NEXT OR DIED", "URL", "ERROR"},
				cells: func(c api.Callback) []any {
					at := "-"
					if t := cmp.Or(c.DiedAt, c.NextAt); t != nil {
						at = formatTime(*t)
					}
					return []any{c.ID, c.Tenant, c.Type, c.State, c.Tries, at, c.URL, c.Error}
				},
			})
		}),
	}
	list.add(cmd, "callbacks")
	cmd.Flags().StringVar(&filter.State, "state", "", "dead or pending (default dead)")
	cmd.Flags().StringVar(&filter.Tenant, "tenant", "", "only of this tenant")
	return cmd
}

func newCallbackRedeliver(r *Root) *cobra.Command {
	var all bool
	var tenant string
	cmd := &cobra.Command{
		Use:   "redeliver CALLBACK... | --all [--tenant TENANT]",
		Short: "Send callbacks again now: those named, or all dead ones",
		Long: "Send callbacks again now: those named, or all dead ones. Each gets all its tries again.\n\n" +
			"With --all the command waits while an endpoint has as many pending callbacks as it may have.",
		Example: "  bulkaction callback redeliver my-group.1.completed\n  bulkaction callback redeliver --all --tenant acme",
		Args: func(_ *cobra.Command, args []string) error {
			if all == (len(args) > 0) || tenant != "" && !all {
				return usagef("callback redeliver needs ids of callbacks, or --all and perhaps --tenant")
			}
			return nil
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			if all {
				return r.redeliverDead(ctx, a, tenant)
			}
			var failed []error
			for _, id := range args {
				c, err := a.Redeliver(ctx, id)
				if err == nil {
					err = r.show(c, func(t table) { t.row(c.ID, c.State) })
				}
				if err != nil {
					failed = append(failed, err)
				}
				if ctx.Err() != nil {
					break
				}
			}
			err := errors.Join(failed...)
			if e, ok := errors.AsType[*client.Error](err); ok && e.Status == http.StatusNotFound {
				return withHint(err, "One that was delivered is forgotten, and can't be sent again. `bulkaction callback ls` lists dead ones.")
			}
			return err
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "all dead callbacks")
	cmd.Flags().StringVar(&tenant, "tenant", "", "with --all: only of this tenant")
	return cmd
}

// redeliverDead sends as many callbacks again as were dead in the beginning: those that die again at once,
// because their endpoint is disabled, do not keep it going.
func (r *Root) redeliverDead(ctx context.Context, a *client.API, tenant string) error {
	dead := int64(0)
	for _, err := range a.Callbacks(ctx, client.CallbackFilter{Tenant: tenant}) {
		if err != nil {
			return err
		}
		dead++
	}
	bar := r.newProgress()
	defer bar.stop()
	text, state := "", ""
	note := sync.OnceFunc(func() {
		if bar == nil {
			r.Notef("%s sent again. An endpoint has as many pending callbacks as it may have: waiting.", text)
		}
	})
	var sum api.Redelivered
	for more := true; more; {
		step, err := a.RedeliverDead(ctx, tenant)
		sum.Redelivered, sum.Refused = sum.Redelivered+step.Redelivered, step.Refused // each call sees those again
		more = (step.More && step.Redelivered > 0 || step.Full) && sum.Redelivered < dead
		text, state = thousands(sum.Redelivered)+" of "+counted(dead, "dead callback"), ""
		if more && step.Full {
			state = "waiting for a full endpoint"
			note()
		}
		bar.show("", state, text, sum.Redelivered, dead)
		if state != "" {
			err = redisx.Sleep(ctx, 500*time.Millisecond)
		}
		if err != nil {
			return withHint(err, "%s sent again. The same command sends the others.", text)
		}
	}
	bar.stop()
	if sum.Refused > 0 {
		r.Notef("Left out: %s, because the endpoint is disabled or deleted. First set it again, by `bulkaction callback set`.",
			counted(sum.Refused, "dead callback"))
	}
	return r.show(sum, func(t table) { t.row("Sent again", counted(sum.Redelivered, "callback")) })
}
