package httpapi_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

var document = apitest.NewDocument(httpapi.OpenAPIDocument)

// requireDocumented checks an answer against the OpenAPI document. A request that the document does
// not describe must be answered with an error, unless its method is HEAD.
func requireDocumented(t *testing.T, req *http.Request, rec *httptest.ResponseRecorder) {
	t.Helper()
	if !document.Describes(t, req, rec) && req.Method != http.MethodHead {
		require.GreaterOrEqual(t, rec.Code, 400, "%s %s is not documented", req.Method, req.URL.Path)
	}
}

// requireSchema checks a JSON document against a schema of the OpenAPI document.
func requireSchema(t *testing.T, name string, doc []byte) {
	t.Helper()
	var v any
	require.NoError(t, json.Unmarshal(doc, &v))
	require.NoError(t, document.Components.Schemas[name].Value.VisitJSON(v), string(doc))
}

func TestDocumentIsValidAndServed(t *testing.T) {
	require.NoError(t, document.Validate(t.Context()))
	rec := call(t, httpapi.New(options(apitest.NewBackend())), "GET", "/openapi.yaml", "")
	require.Equal(t, httpapi.OpenAPIDocument, rec.Body.Bytes())
}

func TestDocumentAndRoutesAgree(t *testing.T) {
	var served []string
	for _, rt := range httpapi.Routes() {
		call := rt.Method + " " + strings.TrimSuffix(rt.Path, "{$}")
		for _, name := range rt.Query {
			served = append(served, call+" ?"+name)
		}
		served = append(served, call)
	}
	require.ElementsMatch(t, served, document.Calls(t))
}

// TestDocumentAndTypesAgree: each schema in the table has the JSON fields of its Go type, and no
// others. Schemas of answers require the fields that are never omitted.
func TestDocumentAndTypesAgree(t *testing.T) {
	for _, c := range []struct {
		schema  string
		value   any
		request bool
	}{
		{"SubmitGroup", messages.SubmitGroup{}, true}, {"SubmitJob", messages.Job{}, true}, {"Aggregate", messages.Aggregate{}, true},
		{"Accepted", api.Accepted{}, false}, {"Appended", api.Appended{}, false}, {"AppendProblem", api.AppendProblem{}, false},
		{"Counts", api.Counts{}, false}, {"DeadLetter", api.DeadLetter{}, false}, {"DeadLetterList", api.DeadLetterList{}, false},
		{"Event", api.Event{}, false}, {"Failure", api.Failure{}, false}, {"FieldError", api.FieldError{}, false},
		{"Group", api.Group{}, false}, {"GroupList", api.GroupList{}, false}, {"Job", api.Job{}, false}, {"JobError", api.JobError{}, false},
		{"LineError", api.LineError{}, false}, {"Problem", api.Problem{}, false}, {"RateLimit", api.RateLimit{}, false},
		{"Result", api.Result{}, false}, {"StageStatus", api.StageStatus{}, false}, {"Stats", api.Stats{}, false},
		{"Why", api.Why{}, false}, {"WhyLimit", api.WhyLimit{}, false}, {"Paused", api.Paused{}, false},
		{"TenantSettings", api.TenantSettings{}, true}, {"Tenant", api.Tenant{}, false}, {"TenantList", api.TenantList{}, false},
		{"TenantWindow", api.TenantWindow{}, false}, {"TenantCongestion", api.TenantCongestion{}, false},
		{"Guard", api.Guard{}, false}, {"GuardList", api.GuardList{}, false}, {"GuardSummary", api.GuardSummary{}, false},
		{"GuardSpec", api.GuardSpec{}, false}, {"GuardMember", api.GuardMember{}, false}, {"GuardQueue", api.GuardQueue{}, false},
		{"GuardAction", api.GuardAction{}, false},
		{"RejectedMessage", api.RejectedMessage{}, false}, {"RejectedList", api.RejectedList{}, false},
		{"EventSettings", api.EventSettings{}, true}, {"RoomEvent", api.RoomEvent{}, false}, {"RoomEventList", api.RoomEventList{}, false},
		{"EventSlots", api.EventSlots{}, false}, {"Recalibration", api.Recalibration{}, true}, {"EventRemoval", api.EventRemoval{}, false},
		{"UserRemoval", api.UserRemoval{}, false}, {"EntryTokenCompletion", api.EntryTokenCall{}, true}, {"EntryToken", api.EntryToken{}, false},
		{"EntryTokenState", api.EntryTokenState{}, false}, {"EntryTokenDone", api.EntryTokenDone{}, false},
		{"Activity", api.Activity{}, false}, {"ActivityList", api.ActivityList{}, false},
		{"JobMap", api.JobMap{}, false}, {"MapBucket", api.MapBucket{}, false}, {"FailureSummary", api.FailureSummary{}, false},
		{"FailureCode", api.FailureCode{}, false}, {"FailureFingerprint", api.FailureFingerprint{}, false}, {"FailureSample", api.FailureSample{}, false},
		{"RoleStatus", api.RoleStatus{}, false},
		{"History", api.History{}, false}, {"HistoryPoint", api.HistoryPoint{}, false}, {"JobTotals", api.JobTotals{}, false},
		{"Key", api.Key{}, false}, {"KeyList", api.KeyList{}, false}, {"NewKey", api.NewKey{}, false}, {"KeyRequest", api.KeyRequest{}, true},
		{"KeyRevoked", api.KeyRevoked{}, false}, {"AuditState", api.AuditState{}, false}, {"AuditedPartition", api.AuditedPartition{}, false},
		{"TypeStats", api.TypeStats{}, false}, {"WorkerStatus", api.WorkerStatus{}, false},
	} {
		document.Agrees(t, c.schema, c.value, !c.request)
	}
}

// TestListsHaveOneForm: all calls whose operation id begins with list have the parameters cursor
// and limit and answer in one form. Of the other calls, only streamFailures has a cursor.
func TestListsHaveOneForm(t *testing.T) {
	lists := 0
	for path, item := range document.Paths.Map() {
		for method, op := range item.Operations() {
			if op.OperationID == "streamFailures" { // its pages are lines, and the cursor is in the header Link
				continue
			}
			schema := answerSchema(op)
			var paging []string
			for _, p := range slices.Concat(item.Parameters, op.Parameters) {
				if p.Value.Name == "cursor" || p.Value.Name == "limit" {
					paging = append(paging, p.Ref)
				}
			}
			isList := strings.HasPrefix(op.OperationID, "list")
			require.Equal(t, isList, len(paging) > 0, "%s %s", method, path)
			require.Equal(t, isList, schema != nil && schema.Properties["cursor"] != nil, "%s %s", method, path)
			if !isList {
				continue
			}
			lists++
			require.Equal(t, http.MethodGet, method, path)
			const components = "#/components/"
			require.ElementsMatch(t, []string{components + "parameters/Cursor", components + "parameters/Limit"}, paging, path)
			name := strings.ReplaceAll(path[strings.LastIndex(path, "/")+1:], "-", "_")
			properties, required := 2, []string{name}
			if schema.Properties["scanned"] != nil { // a list that looks at more than it returns
				properties, required = 3, []string{name, "scanned"}
			}
			if schema.Properties["as_of"] != nil { // a list that was made before
				properties++
			}
			require.Len(t, schema.Properties, properties, path)
			require.Equal(t, required, schema.Required, path)
			require.True(t, schema.Properties[name].Value.Type.Is("array"), path)
			require.Equal(t, components+"schemas/NextCursor", schema.Properties["cursor"].Ref, path)
			require.NotNil(t, op.Responses.Value("422"), path)
		}
	}
	require.GreaterOrEqual(t, lists, 7)
}

// answerSchema returns the schema of the JSON that a call answers with status 200. It returns nil
// if the call has no such answer.
func answerSchema(op *openapi3.Operation) *openapi3.Schema {
	answer := op.Responses.Value("200")
	if answer == nil || answer.Value.Content["application/json"] == nil {
		return nil
	}
	return answer.Value.Content["application/json"].Schema.Value
}
