package console

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// referencePage shows the reference of the API.
type referencePage struct{ *Console }

// referenceData is the data of the reference.
type referenceData struct {
	*reference
	Address string // of the API, for the lines with curl
	Keys    bool   // calls need an API key
	NoAPI   bool   // this address does not serve the API
}

// host matches a Host header that is safe to show in a command line.
var host = regexp.MustCompile(`^[A-Za-z0-9.\[\]:_-]+$`)

func (c referencePage) view(r *http.Request) (view, error) {
	doc, err := theReference()
	if err != nil {
		return view{}, err
	}
	d := referenceData{reference: doc, Address: c.address(r), Keys: c.Keys != nil, NoAPI: c.NoAPI}
	return view{name: "reference", title: "API", data: d}, nil
}

// address returns the URL by which the browser reaches the console, from the header Host; ADDRESS
// stands for a host that is not safe to show. The API has the same address if this process serves
// it.
func (c *Console) address(r *http.Request) string {
	scheme := "http://"
	if c.Secure || c.TLS {
		scheme = "https://"
	}
	if !host.MatchString(r.Host) {
		return scheme + "ADDRESS"
	}
	return scheme + r.Host
}

// apiOption returns the value that command lines need for --api; "" if they need none, because the
// API's address is the default of the command line. It is the word URL if this process does not
// serve the API.
func (c *Console) apiOption(r *http.Request) string {
	if c.NoAPI {
		return "URL"
	}
	at := c.address(r)
	if at == "http://127.0.0.1:8080" || at == "http://localhost:8080" {
		return ""
	}
	return at
}

// Curl returns a command line that makes a call.
func (d referenceData) Curl(c apiCall) string {
	line := "curl"
	if c.Method != http.MethodGet {
		line += " -X " + c.Method
	}
	if d.Keys && c.Scope != "" {
		line += ` -H "Authorization: Bearer $BULKACTION_API_KEY"`
	}
	if c.Body != nil {
		sample := strings.ReplaceAll(c.Body.Sample, "'", `'\''`)
		line += " -H 'Content-Type: " + c.Body.Media[0] + "' -d '" + sample + "'"
	}
	return line + " '" + d.Address + c.sample + "'"
}

// reference is the API's OpenAPI document and the codes of its problems, as data of the template.
type reference struct {
	Tags    []apiTag
	Schemas []apiSchema
	Codes   []api.ProblemCode
}

// apiTag is calls that belong together.
type apiTag struct {
	Name  string
	Text  prose
	Calls []apiCall
}

// ID is the id of the tag in the page.
func (t apiTag) ID() string { return "tag-" + strings.ReplaceAll(t.Name, " ", "-") }

type apiCall struct {
	ID, Method, Path, Summary string
	Text                      prose
	Scope                     auth.Scope  // "": the call needs no key
	Roles                     []auth.Role // that may make the call
	Params                    []apiField
	Body                      *apiBody // nil: none
	Answers                   []apiAnswer
	Errors                    []string // statuses
	sample                    string   // the path with names in place of its parameters
}

// apiField is a parameter, or a field of a schema.
type apiField struct {
	Name, In string
	Required bool
	Type     apiType
	Text     prose
}

type apiBody struct {
	Media  []string
	Type   apiType
	Text   prose
	Sample string // of the first media type
}

type apiAnswer struct {
	Status string
	Text   prose
	Type   apiType
}

// apiSchema is a named schema of the document: an object, which has Fields, or another type, which
// has Type.
type apiSchema struct {
	Name   string
	Text   prose
	Type   apiType
	Fields []apiField
}

// theReference parses the OpenAPI document at the first call, because that takes some milliseconds
// and most processes never show it.
var theReference = sync.OnceValues(func() (*reference, error) {
	doc, err := openapi3.NewLoader().LoadFromData(httpapi.OpenAPI())
	if err != nil {
		return nil, fmt.Errorf("read the OpenAPI document: %w", err)
	}
	return newReference(doc, httpapi.Scopes()), nil
})

func newReference(doc *openapi3.T, scopes map[string]auth.Scope) *reference {
	ref := &reference{Codes: api.ProblemCodes()}
	byTag := map[string][]apiCall{}
	for _, path := range doc.Paths.InMatchingOrder() {
		item := doc.Paths.Value(path)
		for method, op := range item.Operations() {
			c := newCall(method, path, op, slices.Concat(item.Parameters, op.Parameters))
			c.Scope = scopes[method+" "+path]
			for _, role := range auth.Roles {
				if c.Scope != "" && (auth.Principal{Role: role}).May(c.Scope) {
					c.Roles = append(c.Roles, role)
				}
			}
			byTag[op.Tags[0]] = append(byTag[op.Tags[0]], c)
		}
	}
	for _, tag := range doc.Tags {
		calls := byTag[tag.Name]
		slices.SortFunc(calls, func(a, b apiCall) int {
			return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(methodOrder(a.Method), methodOrder(b.Method)))
		})
		ref.Tags = append(ref.Tags, apiTag{tag.Name, proseOf(tag.Description), calls})
	}
	for _, name := range slices.Sorted(maps.Keys(doc.Components.Schemas)) {
		s := doc.Components.Schemas[name]
		ref.Schemas = append(ref.Schemas, apiSchema{
			Name: name, Text: proseOf(s.Value.Description), Type: typeOf(s), Fields: fieldsOf("", s.Value),
		})
	}
	return ref
}

func methodOrder(method string) int {
	return slices.Index([]string{"GET", "POST", "PUT", "PATCH", "DELETE"}, method)
}

func newCall(method, path string, op *openapi3.Operation, params openapi3.Parameters) apiCall {
	c := apiCall{
		ID: op.OperationID, Method: method, Path: path, Summary: op.Summary, Text: proseOf(op.Description),
		sample: path,
	}
	for _, p := range params {
		p := p.Value
		c.Params = append(c.Params, apiField{p.Name, p.In, p.Required, typeOf(p.Schema), proseOf(p.Description)})
		if p.In == openapi3.ParameterInPath {
			c.sample = strings.Replace(c.sample, "{"+p.Name+"}", strings.ToUpper(p.Name), 1)
		}
	}
	if op.RequestBody != nil {
		body := op.RequestBody.Value
		media := slices.Sorted(maps.Keys(body.Content))
		first := body.Content[media[0]]
		c.Body = &apiBody{media, typeOf(first.Schema), proseOf(body.Description), sampleOf(first.Schema)}
	}
	for _, status := range op.Responses.Keys() {
		answer := op.Responses.Value(status).Value
		if status[0] != '2' && status[0] != '3' {
			if status != "default" {
				c.Errors = append(c.Errors, status)
			}
			continue
		}
		a := apiAnswer{Status: status}
		if answer.Description != nil {
			a.Text = proseOf(*answer.Description)
		}
		for _, media := range slices.Sorted(maps.Keys(answer.Content)) {
			a.Type = typeOf(answer.Content[media].Schema)
		}
		c.Answers = append(c.Answers, a)
	}
	return c
}
